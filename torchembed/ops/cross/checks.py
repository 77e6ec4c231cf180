"""Requirements of the ``cross_epilogue_*`` and ``low_rank_cross_*`` operations on their
arguments."""

import torch
from torch import Tensor

from torchembed.core import checks
from torchembed.ops.linear.checks import check_sums


def _check_epilogue(x0: Tensor, bias: Tensor, **others: Tensor) -> None:
    """Check what forward and backward have in common; ``others`` have the shape of ``x0``."""
    checks.check_matrix("x0", x0)
    shape = x0.shape
    for name, other in others.items():
        checks.check_float(name, other)
        if other.shape != shape:
            raise ValueError(
                f"{name} must have the shape of x0, {tuple(shape)}, got {tuple(other.shape)}"
            )
        checks.check_contiguous(name, other)
    checks.check_float("bias", bias)
    checks.check_dim("bias", bias, 1)
    checks.check_numel("bias", bias, shape[1], "one for each column of x0")
    checks.check_contiguous("bias", bias)
    checks.check_same_device("x0", x0, bias=bias, **others)


def check_cross_epilogue_forward(x0: Tensor, z: Tensor, bias: Tensor, x: Tensor) -> None:
    _check_epilogue(x0, bias, z=z, x=x)


def check_cross_epilogue_backward(
    grad: Tensor, x0: Tensor, z: Tensor, bias: Tensor, x_is_x0: bool
) -> None:
    _check_epilogue(x0, bias, grad=grad, z=z)


def check_low_rank_cross_forward(x0: Tensor, h: Tensor, u: Tensor, bias: Tensor, x: Tensor) -> None:
    checks.check_matrix("x0", x0)
    checks.check_dim("h", h, 2)
    (num_rows, width), depth = x0.shape, h.shape[1]
    checks.check_operand("h", h, (num_rows, depth), "a row for each of x0", "x0", x0)
    checks.check_operand("u", u, (width, depth), "columns of x0, columns of h", "x0", x0)
    checks.check_operand("bias", bias, (width,), "one for each column of x0", "x0", x0)
    checks.check_operand("x", x, (num_rows, width), "that of x0", "x0", x0)


def check_low_rank_cross_scale(grad: Tensor, x0: Tensor, sums: Tensor) -> None:
    checks.check_matrix("grad", grad)
    checks.check_operand("x0", x0, grad.shape, "that of grad", "grad", grad)
    check_sums(sums, "grad", grad)


def check_low_rank_cross_backward(
    grad: Tensor, grad_h: Tensor, v: Tensor, x0: Tensor, sums: Tensor
) -> None:
    checks.check_matrix("grad", grad)
    _check_factors(grad_h, v, "grad", grad)
    checks.check_operand("x0", x0, grad.shape, "that of grad", "grad", grad)
    if sums.dim() == 2 and grad.dtype is torch.float32:
        # Tiles of a product of float32 have fewer rows than a partial sum.
        raise ValueError(
            "sums must have 1 dimension for a float32 grad, whose partial sums are added up here, "
            f"got shape {tuple(sums.shape)}"
        )
    check_sums(sums, "grad", grad)


def check_low_rank_cross_input_backward(
    grad_h: Tensor, v: Tensor, grads: list[Tensor], z: list[Tensor], widths: list[int]
) -> None:
    if not grads or len(grads) != len(z):
        raise ValueError(
            "grads and z must hold one tensor a layer, of one layer or more, "
            f"got {len(grads)} and {len(z)}"
        )
    first = grads[0]
    checks.check_matrix("grads[0]", first)
    _check_factors(grad_h, v, "grads[0]", first)
    shape = first.shape
    for name, tensors in (("grads", grads), ("z", z)):
        for layer, tensor in enumerate(tensors):
            if tensor is not first:
                checks.check_operand(
                    f"{name}[{layer}]", tensor, shape, "that of grads[0]", "grads[0]", first
                )
    if any(width < 0 for width in widths) or sum(widths) != shape[1]:
        raise ValueError(
            f"widths must be counts >= 0 whose sum is {shape[1]}, the columns of grads[0], "
            f"got {list(widths)}"
        )


def _check_factors(grad_h: Tensor, v: Tensor, name: str, grad: Tensor) -> None:
    """Check the factors of a product ``grad_h @ v`` with the shape of ``grad``."""
    checks.check_dim("grad_h", grad_h, 2)
    (num_rows, width), depth = grad.shape, grad_h.shape[1]
    checks.check_operand("grad_h", grad_h, (num_rows, depth), "a row for each sample", name, grad)
    checks.check_operand("v", v, (depth, width), "columns of grad_h, of the result", name, grad)
