"""The Triton kernels of ``encode_rows``, ``scaled_rows`` and ``decode_rows``.

Byte floor: each element read once and written once, with a byte more a row. GPUs of compute
capability 8.9 and later convert elements by an instruction; on others, and in the interpreter,
integers give the same bits, at some 25 operations an element.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from torchembed.core import environment
from torchembed.triton_kernels.launch_sizes import cdiv, next_power_of_2
from torchembed.triton_kernels.rounding import as_float32, round_to_nearest
from torchembed.triton_kernels.row_blocks import index_type

_ELEMENTS = 2048
"""Elements of a program's rows, unless one row has more."""


@triton.jit
def _e4m3_of(values, NATIVE: tl.constexpr):
    """The e4m3 bits, uint8, of float32 ``values`` below 2**8, to nearest, ties to even; NaN for
    infinities and NaN.

    Example: 1, -1.0625, 0.001953125 and 208 are 0x38, 0xB8, 0x01 and 0x75.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if NATIVE:
        # The instruction lets infinities saturate.
        values = tl.where(magnitude < 0x7F800000, values, float("nan"))
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    # Three bits of the fraction stay. Half of the last is added, less one where it is 0.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2**-6 e4m3 is spaced by 2**-9, as float32 is from 2**14 on.
    spaced = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < ((127 - 6) << 23), spaced, normal)
    code = tl.where(magnitude < 0x7F800000, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _of_e4m3(codes, NATIVE: tl.constexpr):
    """The float32 values of the e4m3 bits ``codes``, uint8.

    Example: 0x38, 0xB8, 0x01 and 0x75 are 1, -1, 0.001953125 and 208.
    """
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    codes = codes.to(tl.int32)
    magnitude = codes & 0x7F
    normal = ((magnitude + ((127 - 7) << 3)) << 20).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits) | ((codes & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _places(
    num_rows, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr
):
    """The rows ``[ROWS, 1]`` and columns ``[1, COLUMNS]`` of this program, and which are there."""
    row = (tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)).expand_dims(1)
    column = tl.arange(0, COLUMNS).expand_dims(0)
    return row, column, (row < num_rows) & (column < DIM)


@triton.jit(do_not_specialize=["num_rows"])
def _encode_rows_kernel(
    rows_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NATIVE: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``codes[r, d] = e4m3(rows[r, d] * 2**(127 - b))`` with ``codes[r, D] = b``, where
    ``2**(b - 120)`` is the largest power of two in the rounded row, and ``b`` at least 1. Where
    there are ``scales``, ``scales[r] = 2**(b - 127)`` in its place, and ``codes`` have D columns.

    Example: of 1 and -1.0625 the largest power of two is 1, so that b is 120: both are multiplied
    by 128, and become 0x70, 0xF0, 120. 1 and 1.9375, which rounds to 2, become 0x68, 0x70, 121.
    Zeros become 0, 0, 1.
    """
    row, column, inside = _places(num_rows, DIM, ROWS, COLUMNS, INDEX)
    values = as_float32(tl.load(rows_ptr + row * DIM + column, mask=inside, other=0.0))
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # Magnitudes are in the order of their bits.
    largest = tl.max(tl.where(magnitude < 0x7F800000, magnitude, 0), axis=1, keep_dims=True)
    scale = tl.maximum(((largest + (1 << 19)) >> 23) - 7, 1)
    code = _e4m3_of(values * ((254 - scale) << 23).to(tl.float32, bitcast=True), NATIVE)
    if scales_ptr is None:
        line_ptr = codes_ptr + row * (DIM + 1)
        tl.store(line_ptr + DIM, scale.to(tl.uint8), mask=row < num_rows)
    else:
        line_ptr = codes_ptr + row * DIM
        tl.store(scales_ptr + row, (scale << 23).to(tl.float32, bitcast=True), mask=row < num_rows)
    tl.store(line_ptr + column, code, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _decode_rows_kernel(
    codes_ptr,
    rows_ptr,
    num_rows,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NATIVE: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``rows[r, d] = codes[r, d] * 2**(codes[r, D] - 127)``, where elements are e4m3.

    Example: 0x70, 0xF0, 120 become 1, -1.
    """
    row, column, inside = _places(num_rows, DIM, ROWS, COLUMNS, INDEX)
    line_ptr = codes_ptr + row * (DIM + 1)
    code = tl.load(line_ptr + column, mask=inside, other=0)
    scale = tl.load(line_ptr + DIM, mask=row < num_rows, other=1).to(tl.int32)
    values = _of_e4m3(code, NATIVE) * (scale << 23).to(tl.float32, bitcast=True)
    rounded = round_to_nearest(values, rows_ptr.dtype.element_ty)
    tl.store(rows_ptr + row * DIM + column, rounded, mask=inside)


def _blocks(dim: int) -> tuple[int, int]:
    """Rows and columns of a program."""
    columns = next_power_of_2(dim)
    return max(1, _ELEMENTS // columns), columns


@functools.cache
def _converts(device: torch.device) -> bool:
    """True where the GPU ``device``, the current one, has instructions that convert e4m3."""
    interpreted = environment.triton_interpreted()
    return not interpreted and driver.active.get_current_target().arch >= 89


def _encode(rows: Tensor, codes: Tensor, scales: Tensor | None) -> None:
    num_rows, dim = rows.shape
    if num_rows == 0:
        return
    of_program, columns = _blocks(dim)
    with torch.cuda.device_of(rows):
        _encode_rows_kernel[(cdiv(num_rows, of_program),)](
            rows,
            codes,
            scales,
            num_rows,
            DIM=dim,
            ROWS=of_program,
            COLUMNS=columns,
            NATIVE=_converts(codes.device),
            INDEX=index_type(codes),
        )


def launch_encode_rows(rows: Tensor) -> Tensor:
    """``torchembed::encode_rows``; see :func:`torchembed.ops.row_codec.encode_rows`."""
    codes = rows.new_empty(rows.shape[0], rows.shape[1] + 1, dtype=torch.uint8)
    _encode(rows, codes, None)
    return codes


def launch_scaled_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``torchembed::scaled_rows``; see :func:`torchembed.ops.row_codec.scaled_rows`."""
    elements = rows.new_empty(rows.shape, dtype=torch.uint8)
    scales = rows.new_empty(rows.shape[0], 1, dtype=torch.float32)
    _encode(rows, elements, scales)
    return elements.view(torch.float8_e4m3fn), scales


def launch_decode_rows(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """``torchembed::decode_rows``; see :func:`torchembed.ops.row_codec.decode_rows`."""
    num_rows, dim = codes.shape[0], codes.shape[1] - 1
    rows = torch.empty(num_rows, dim, dtype=dtype, device=codes.device)
    if num_rows:
        of_program, columns = _blocks(dim)
        with torch.cuda.device_of(codes):
            _decode_rows_kernel[(cdiv(num_rows, of_program),)](
                codes,
                rows,
                num_rows,
                DIM=dim,
                ROWS=of_program,
                COLUMNS=columns,
                NATIVE=_converts(codes.device),
                INDEX=index_type(codes),
            )
    return rows
