"""The specification of the ``cross_epilogue_*`` and ``low_rank_cross_*`` operations in eager
torch."""

import torch
from torch import Tensor

from torchembed.ops.linear.reference import put_sums_reference


def epilogue_dtype(x0: Tensor, z: Tensor, x: Tensor) -> torch.dtype:
    """The dtype that torch promotes the three to; the bias does not take part."""
    return torch.promote_types(torch.promote_types(x0.dtype, z.dtype), x.dtype)


def cross_epilogue_forward_reference(x0: Tensor, z: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    crossed = x0.float() * (z.float() + bias.float()) + x.float()
    return crossed.to(epilogue_dtype(x0, z, x))


def cross_epilogue_backward_reference(
    grad: Tensor, x0: Tensor, z: Tensor, bias: Tensor, x_is_x0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x0 = grad.float() * (z.float() + bias.float())
    if x_is_x0:
        grad_x0 = grad_x0 + grad.float()
    grad_z = grad.float() * x0.float()
    return grad_x0.to(x0.dtype), grad_z.to(z.dtype), grad_z.sum(0).to(bias.dtype)


def low_rank_cross_forward_reference(
    x0: Tensor, h: Tensor, u: Tensor, bias: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    z = h.float() @ u.float().t() + bias.float()
    return (x0.float() * z + x.float()).to(x0.dtype), z.to(x0.dtype)


def low_rank_cross_scale_reference(grad: Tensor, x0: Tensor, sums: Tensor) -> Tensor:
    grad_z = grad.float() * x0.float()
    put_sums_reference(grad_z, sums)
    return grad_z.to(grad.dtype)


def low_rank_cross_backward_reference(
    grad: Tensor, grad_h: Tensor, v: Tensor, x0: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor]:
    grad_x = grad.float() + grad_h.float() @ v.float()
    grad_z = grad_x * x0.float()
    put_sums_reference(grad_z, sums)
    return grad_x.to(grad.dtype), grad_z.to(grad.dtype)


def low_rank_cross_input_backward_reference(
    grad_h: Tensor, v: Tensor, grads: list[Tensor], z: list[Tensor], widths: list[int]
) -> list[Tensor]:
    total = grad_h.float() @ v.float() + grads[0].float()
    for grad, factor in zip(grads, z, strict=True):
        total = total + grad.float() * factor.float()
    # Clones, since results of an operation may not share memory.
    return [part.clone() for part in total.to(grad_h.dtype).split(widths, dim=1)]
