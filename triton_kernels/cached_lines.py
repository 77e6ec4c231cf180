"""Lines of caches, inside kernels: as float32, whatever their format."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.cached_lookups import SCALE_BYTES
from torchembed.triton_kernels.rounding import as_float32


@triton.jit
def float8_as_float32(code):
    """Float32 of each ``code``, the bits of a float8_e4m3fn as uint8; exact.

    Example: 0x38 is 1, 0xC4 is -3, 0x01 is 2**-9, 0x7F is NaN.
    """
    bits = code.to(tl.int32)
    exponent, fraction = (bits >> 3) & 15, bits & 7
    normal = (((exponent + 120) << 23) | (fraction << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, fraction.to(tl.float32) * 0.001953125, normal)
    size = tl.where((bits & 127) == 127, float("nan"), size)
    return tl.where(bits >= 128, -size, size)


@triton.jit
def load_line(
    elements_ptr,
    scales_ptr,
    line,
    inside,
    column,
    in_row,
    STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
):
    """Float32 ``[N, C]``: the columns of each ``line [N]`` that is ``inside``, zeros of others.

    Example: int8, ``STRIDE = 8``, ``FIRST = 4``, scale 0.5 and codes 2 4 0 0: ``1 2``.
    """
    offset = line[:, None] * STRIDE + FIRST + column[None, :]
    element = tl.load(elements_ptr + offset, mask=inside[:, None] & in_row[None, :], other=0)
    if scales_ptr is None:
        value = as_float32(element)
    else:
        value = float8_as_float32(element) if IS_FLOAT8 else element.to(tl.float32)
        scale = tl.load(scales_ptr + line * (STRIDE // 4), mask=inside, other=0.0)
        value *= scale[:, None]
    return value


class LineViews(NamedTuple):
    """Lines as :func:`load_line` takes them."""

    elements: Tensor | None
    scales: Tensor | None


class LineLayout(NamedTuple):
    """The elements from a line to the next one, those before its first column, which its scale
    takes, and whether they are float8_e4m3fn: constants of kernels that call :func:`load_line`."""

    STRIDE: int
    FIRST: int
    IS_FLOAT8: bool


def line_views(lines: Tensor | None, dtype: torch.dtype) -> LineViews:
    """``lines``, uint8 ``[R, line_bytes]``, of elements of ``dtype``; no views of None."""
    if lines is None:
        return LineViews(None, None)
    return LineViews(
        lines.view(_kept_dtype(dtype)), lines.view(torch.float32) if dtype.itemsize == 1 else None
    )


def line_layout(lines: Tensor, dtype: torch.dtype) -> LineLayout:
    """The layout of ``lines``, as :func:`line_views` takes them."""
    return LineLayout(
        STRIDE=lines.shape[1] // dtype.itemsize,
        FIRST=SCALE_BYTES if dtype.itemsize == 1 else 0,
        IS_FLOAT8=dtype == torch.float8_e4m3fn,
    )


def _kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel loads elements of ``dtype``: uint8 for float8_e4m3fn, which
    Triton's interpreter does not have."""
    return torch.uint8 if dtype == torch.float8_e4m3fn else dtype
