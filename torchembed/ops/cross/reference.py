"""The specification of the ``cross_epilogue_*`` operations in eager torch."""

import torch
from torch import Tensor


def epilogue_dtype(x0: Tensor, z: Tensor, x: Tensor) -> torch.dtype:
    """Torch's promotion of the three; the bias does not take part."""
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
