"""Requirements of the operations behind linear layers on their arguments."""

import torch
from torch import Tensor

from torchembed.core import checks
from torchembed.core.types import ROWS_OF_PARTIAL


def check_sums(sums: Tensor, product_name: str, product: Tensor) -> None:
    """Raise unless ``sums`` can take sums over the rows of ``product [B, N]``: ``[N]``, or float32
    ``[P, N]`` for those over 128 rows each."""
    num_rows, num_columns = product.shape
    if sums.dim() == 1:
        checks.check_float("sums", sums)
        shape, meaning = (num_columns,), f"one for each column of {product_name}"
    else:
        checks.check_dtype("sums", sums, (torch.float32,), "partial sums are not rounded")
        shape = (-(-num_rows // ROWS_OF_PARTIAL), num_columns)
        meaning = f"partial sums over {ROWS_OF_PARTIAL} rows of {product_name} each"
    checks.check_memory("sums", sums, shape, meaning, product_name, product)


def check_linear_relu_backward(grad: Tensor, output: Tensor, sums: Tensor) -> None:
    checks.check_matrix("output", output)
    checks.check_whole_rows("grad", grad)
    _check_like_output("grad", grad, output.shape, "that of output", output)
    check_sums(sums, "output", output)


def check_linear_relu_input_backward(
    grad: Tensor, weight: Tensor, output: Tensor, sums: Tensor
) -> None:
    checks.check_matrix("output", output)
    checks.check_dim("weight", weight, 2)
    (num_rows, width), depth = output.shape, weight.shape[0]
    _check_like_output("grad", grad, (num_rows, depth), "rows of output and of weight", output)
    _check_like_output("weight", weight, (depth, width), "a column for each of output", output)
    check_sums(sums, "output", output)


def check_sum_rows(grad: Tensor, total: Tensor) -> None:
    checks.check_float("grad", grad)
    checks.check_whole_rows("grad", grad)
    _check_total(total, "grad", grad)


def check_sum_partials(partials: Tensor, total: Tensor) -> None:
    checks.check_dtype("partials", partials, (torch.float32,), "call .float()")
    checks.check_dim("partials", partials, 2)
    checks.check_contiguous("partials", partials)
    _check_total(total, "partials", partials)


def check_linear_to_one_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    checks.check_matrix("x", x)
    checks.check_operand("weight", weight, (1, x.shape[1]), "a row of x", "x", x)
    if bias is not None:
        checks.check_operand("bias", bias, (1,), "a bias of one output", "x", x)


def check_linear_to_one_backward(
    grad: Tensor, x: Tensor, weight: Tensor, grad_weight: Tensor, grad_bias: Tensor | None
) -> None:
    check_linear_to_one_forward(x, weight, None)
    checks.check_operand("grad", grad, (x.shape[0], 1), "a column for the samples of x", "x", x)
    checks.check_float("grad_weight", grad_weight)
    checks.check_memory("grad_weight", grad_weight, weight.shape, "that of weight", "x", x)
    if grad_bias is not None:
        checks.check_float("grad_bias", grad_bias)
        checks.check_memory("grad_bias", grad_bias, (1,), "the gradient of one bias", "x", x)


def _check_like_output(
    name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str, output: Tensor
) -> None:
    """Raise unless ``tensor`` has ``shape``, and the dtype and the device of ``output``."""
    if tensor.dtype is not output.dtype:
        checks.check_dtype(name, tensor, (output.dtype,), "cast it to the dtype of output")
    if tensor.shape != shape or tensor.device != output.device:
        checks.check_shape(name, tensor, shape, meaning)
        checks.check_same_device("output", output, **{name: tensor})


def _check_total(total: Tensor, name: str, matrix: Tensor) -> None:
    checks.check_float("total", total)
    meaning = f"one for each column of {name}"
    checks.check_memory("total", total, (matrix.shape[1],), meaning, name, matrix)
