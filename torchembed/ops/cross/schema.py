"""Defines the ``torchembed::cross_epilogue_*`` operations and picks their kernels."""

import torch
from torch import Tensor

from torchembed.core.dispatch import define_op
from torchembed.ops.cross.reference import (
    cross_epilogue_backward_reference,
    cross_epilogue_forward_reference,
    epilogue_dtype,
)

_TRITON = "torchembed.triton_kernels.cross"


def _forward_fake(x0: Tensor, z: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x0, dtype=epilogue_dtype(x0, z, x))


def _backward_fake(
    grad: Tensor, x0: Tensor, z: Tensor, bias: Tensor, x_is_x0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x0), torch.empty_like(z), torch.empty_like(bias)


cross_epilogue_forward_op = define_op(
    "cross_epilogue_forward(Tensor x0, Tensor z, Tensor bias, Tensor x) -> Tensor",
    reference=cross_epilogue_forward_reference,
    fake=_forward_fake,
    triton=f"{_TRITON}:launch_cross_epilogue_forward",
)
cross_epilogue_backward_op = define_op(
    "cross_epilogue_backward(Tensor grad, Tensor x0, Tensor z, Tensor bias, bool x_is_x0)"
    " -> (Tensor, Tensor, Tensor)",
    reference=cross_epilogue_backward_reference,
    fake=_backward_fake,
    triton=f"{_TRITON}:launch_cross_epilogue_backward",
)
