"""Defines the ``torchembed::binary_cross_entropy_*`` operations and picks their kernels."""

import torch
from torch import Tensor

from torchembed.core.dispatch import define_op
from torchembed.ops.binary_cross_entropy.checks import (
    check_binary_cross_entropy_backward,
    check_binary_cross_entropy_forward,
)
from torchembed.ops.binary_cross_entropy.reference import (
    binary_cross_entropy_backward_reference,
    binary_cross_entropy_forward_reference,
)

_TRITON = "torchembed.triton_kernels.binary_cross_entropy"


def _forward_fake(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.new_empty((), dtype=torch.float32)


def _backward_fake(grad: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    return torch.empty_like(logits)


binary_cross_entropy_forward_op = define_op(
    "binary_cross_entropy_forward(Tensor logits, Tensor labels) -> Tensor",
    reference=binary_cross_entropy_forward_reference,
    fake=_forward_fake,
    triton=f"{_TRITON}:launch_binary_cross_entropy_forward",
    check=check_binary_cross_entropy_forward,
)
binary_cross_entropy_backward_op = define_op(
    "binary_cross_entropy_backward(Tensor grad, Tensor logits, Tensor labels) -> Tensor",
    reference=binary_cross_entropy_backward_reference,
    fake=_backward_fake,
    triton=f"{_TRITON}:launch_binary_cross_entropy_backward",
    check=check_binary_cross_entropy_backward,
)
