"""Defines the ``torchembed::cross_epilogue_*`` and ``low_rank_cross_*`` operations and picks their
kernels."""

import torch
from torch import Tensor

from torchembed.core.dispatch import define_op
from torchembed.ops.cross.checks import (
    check_cross_epilogue_backward,
    check_cross_epilogue_forward,
    check_low_rank_cross_backward,
    check_low_rank_cross_forward,
    check_low_rank_cross_input_backward,
    check_low_rank_cross_scale,
)
from torchembed.ops.cross.cuda import backward_kernel, forward_kernel, input_backward_kernel
from torchembed.ops.cross.reference import (
    cross_epilogue_backward_reference,
    cross_epilogue_forward_reference,
    epilogue_dtype,
    low_rank_cross_backward_reference,
    low_rank_cross_forward_reference,
    low_rank_cross_input_backward_reference,
    low_rank_cross_scale_reference,
)

_TRITON = "torchembed.triton_kernels.cross"
_LOW_RANK_TRITON = "torchembed.triton_kernels.low_rank_cross"


def _forward_fake(x0: Tensor, z: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x0, dtype=epilogue_dtype(x0, z, x))


def _backward_fake(
    grad: Tensor, x0: Tensor, z: Tensor, bias: Tensor, x_is_x0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x0), torch.empty_like(z), torch.empty_like(bias)


def _low_rank_forward_fake(
    x0: Tensor, h: Tensor, u: Tensor, bias: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x0), torch.empty_like(x0)


def _low_rank_scale_fake(grad: Tensor, x0: Tensor, sums: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _low_rank_backward_fake(
    grad: Tensor, grad_h: Tensor, v: Tensor, x0: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad), torch.empty_like(grad)


def _low_rank_input_backward_fake(
    grad_h: Tensor, v: Tensor, grads: list[Tensor], z: list[Tensor], widths: list[int]
) -> list[Tensor]:
    return [grad_h.new_empty(grad_h.shape[0], width) for width in widths]


cross_epilogue_forward_op = define_op(
    "cross_epilogue_forward(Tensor x0, Tensor z, Tensor bias, Tensor x) -> Tensor",
    reference=cross_epilogue_forward_reference,
    fake=_forward_fake,
    triton=f"{_TRITON}:launch_cross_epilogue_forward",
    check=check_cross_epilogue_forward,
)
cross_epilogue_backward_op = define_op(
    "cross_epilogue_backward(Tensor grad, Tensor x0, Tensor z, Tensor bias, bool x_is_x0)"
    " -> (Tensor, Tensor, Tensor)",
    reference=cross_epilogue_backward_reference,
    fake=_backward_fake,
    triton=f"{_TRITON}:launch_cross_epilogue_backward",
    check=check_cross_epilogue_backward,
)
low_rank_cross_forward_op = define_op(
    "low_rank_cross_forward(Tensor x0, Tensor h, Tensor u, Tensor bias, Tensor x)"
    " -> (Tensor, Tensor)",
    reference=low_rank_cross_forward_reference,
    fake=_low_rank_forward_fake,
    triton=f"{_LOW_RANK_TRITON}:launch_low_rank_cross_forward",
    cuda=forward_kernel(),
    check=check_low_rank_cross_forward,
)
low_rank_cross_scale_op = define_op(
    "low_rank_cross_scale(Tensor grad, Tensor x0, Tensor(a!) sums) -> Tensor",
    reference=low_rank_cross_scale_reference,
    fake=_low_rank_scale_fake,
    triton=f"{_LOW_RANK_TRITON}:launch_low_rank_cross_scale",
    check=check_low_rank_cross_scale,
)
low_rank_cross_backward_op = define_op(
    "low_rank_cross_backward(Tensor grad, Tensor grad_h, Tensor v, Tensor x0,"
    " Tensor(a!) sums) -> (Tensor, Tensor)",
    reference=low_rank_cross_backward_reference,
    fake=_low_rank_backward_fake,
    triton=f"{_LOW_RANK_TRITON}:launch_low_rank_cross_backward",
    cuda=backward_kernel(),
    check=check_low_rank_cross_backward,
)
low_rank_cross_input_backward_op = define_op(
    "low_rank_cross_input_backward(Tensor grad_h, Tensor v, Tensor[] grads, Tensor[] z,"
    " int[] widths) -> Tensor[]",
    reference=low_rank_cross_input_backward_reference,
    fake=_low_rank_input_backward_fake,
    triton=f"{_LOW_RANK_TRITON}:launch_low_rank_cross_input_backward",
    cuda=input_backward_kernel(),
    check=check_low_rank_cross_input_backward,
)
