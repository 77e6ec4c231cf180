"""The Triton kernel of ``initialize_rows``.

Byte floor for each new row: 20 bytes of its row, id and table read, and its elements of the weight
and of the states written; nothing but ``num_new`` is read where no row is new.
"""

import math

import torch
import triton
import triton.language as tl

from torchembed.core.types import InitializerKind
from torchembed.core.update_records import RowInitialization
from torchembed.triton_kernels.launch_sizes import cdiv
from torchembed.triton_kernels.random_bits import random_bits
from torchembed.triton_kernels.rounding import round_to_nearest
from torchembed.triton_kernels.row_blocks import (
    NUM_WARPS,
    column_block,
    row_block,
)

_UNIFORM = tl.constexpr(int(InitializerKind.UNIFORM))
_NORMAL = tl.constexpr(int(InitializerKind.NORMAL))
_LOG_2 = tl.constexpr(math.log(2))
_RADIANS_A_STEP = tl.constexpr(2 * math.pi / (1 << 24))
# Programs that go through all rows together: most batches bring few new ids, and a program without
# any costs more than a step of a loop.
_MOST_PROGRAMS = 2048


@triton.jit
def _uniform_steps(keys, columns):
    """The one of 2**24 steps from 0 to 1 that is drawn, int32."""
    return (random_bits(keys, columns) >> 40).to(tl.int32)


@triton.jit
def _log_of_steps(steps):
    """Float32 logarithm of ``steps / 2**24``, in the reference's order of operations."""
    bits = steps.to(tl.float32).to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    x = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = tl.div_rn(x - 1.0, x + 1.0)
    z = s * s
    series = ((z * (2 / 9) + 2 / 7) * z + 2 / 5) * z + 2 / 3
    return (exponent - 24).to(tl.float32) * _LOG_2 + (s * 2.0 + s * z * series)


@triton.jit
def _cosine_of_turn(steps):
    """Float32 cosine of ``steps / 2**24`` turns, in the reference's order of operations."""
    quarter = (steps + (1 << 21)) >> 22
    t = (steps - (quarter << 22)).to(tl.float32) * _RADIANS_A_STEP
    z = t * t
    sine = ((z * (1 / 362880) - 1 / 5040) * z + 1 / 120) * z - 1 / 6
    sine = t * z * sine + t
    cosine = (((z * (-1 / 3628800) + 1 / 40320) * z - 1 / 720) * z + 1 / 24) * z - 0.5
    cosine = z * cosine + 1.0
    magnitude = tl.where((quarter & 1) == 0, cosine, sine)
    return tl.where((quarter == 1) | (quarter == 2), -magnitude, magnitude)


@triton.jit
def _standard_normal(keys, columns):
    """Float32 standard normal number of each pair of ``keys`` and ``columns``."""
    first = _uniform_steps(keys, 2 * columns)
    second = _uniform_steps(keys, 2 * columns + 1)
    return tl.sqrt_rn(_log_of_steps((1 << 24) - first) * -2.0) * _cosine_of_turn(second)


@triton.jit
def _store_columns(
    matrix_ptr, row, inside, columns, value, DIM: tl.constexpr, STRIDE: tl.constexpr
):
    """Write ``value [N, C]`` to ``columns [C]``, those before DIM, of each int64 ``row [N]`` that
    is ``inside [N]``; STRIDE elements lie between the beginnings of two rows."""
    place = row[:, None] * STRIDE + columns[None, :]
    tl.store(matrix_ptr + place, value, mask=inside[:, None] & (columns < DIM)[None, :])


@triton.jit
def _fill_state(
    state_ptr,
    row,
    is_new,
    columns,
    value,
    IS_ROWWISE: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Write ``value`` into ``columns`` of each row of a state, or into its only element."""
    if IS_ROWWISE:
        tl.store(state_ptr + row * STRIDE, value, mask=is_new)
    else:
        values = tl.zeros([row.shape[0], columns.shape[0]], tl.float32) + value
        _store_columns(state_ptr, row, is_new, columns, values, DIM, STRIDE)


@triton.jit(do_not_specialize=["num_rows"])
def _initialize_rows_kernel(
    weight_ptr,
    state0_ptr,
    state1_ptr,
    rows_ptr,
    ids_ptr,
    tables_ptr,
    num_new_ptr,
    table_keys_ptr,
    kinds_ptr,
    parameters_ptr,
    first_columns_ptr,
    num_rows,
    initial_state,
    STATE0_IS_ROWWISE: tl.constexpr,
    STATE1_IS_ROWWISE: tl.constexpr,
    DIM: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """``weight[rows[i], c]`` = initial value of ``ids[i]`` in column c of table ``tables[i]``.
    ``STRIDES`` of rows are those of the weight and of each state, in elements.

    Example: D = 2, one table, whose values are 7: ``rows = [2, -1]``, ``num_new = 2``:
    ``weight[2] = [7, 7]``.
    """
    end = num_rows
    if num_new_ptr is not None:
        end = tl.minimum(tl.load(num_new_ptr), num_rows).to(end.dtype)
    first_entry = tl.program_id(0) * BLOCK_ROWS
    while first_entry < end:
        entry = first_entry + tl.arange(0, BLOCK_ROWS)
        row = tl.load(rows_ptr + entry, mask=entry < end, other=-1)
        is_new = row >= 0
        table = tl.load(tables_ptr + entry, mask=is_new, other=0)
        ids = tl.load(ids_ptr + entry, mask=is_new, other=0)
        keys = random_bits(tl.load(table_keys_ptr + table, mask=is_new, other=0), ids)[:, None]
        kind = tl.load(kinds_ptr + table, mask=is_new, other=_UNIFORM)[:, None]
        first = tl.load(parameters_ptr + 2 * table, mask=is_new, other=0.0)[:, None]
        second = tl.load(parameters_ptr + 2 * table + 1, mask=is_new, other=0.0)[:, None]
        any_normal = tl.max((kind == _NORMAL).to(tl.int32)) == 1
        for first_column in range(0, DIM, BLOCK_D):
            columns = first_column + column_block(BLOCK_D, VECTOR)
            drawn = columns[None, :].to(tl.int64)
            if first_columns_ptr is not None:
                drawn += tl.load(first_columns_ptr + table, mask=is_new, other=0)[:, None]
            uniform = _uniform_steps(keys, drawn).to(tl.float32) * 5.9604644775390625e-08
            value = tl.where(kind == _UNIFORM, first + second * uniform, first)
            # Its two draws and two series are some ten times the arithmetic of a uniform number.
            if any_normal:
                normal = first + second * _standard_normal(keys, drawn)
                value = tl.where(kind == _NORMAL, normal, value)
            rounded = round_to_nearest(value, weight_ptr.dtype.element_ty)
            _store_columns(weight_ptr, row, is_new, columns, rounded, DIM, STRIDES[0])
            if state0_ptr is not None:
                _fill_state(
                    state0_ptr,
                    row,
                    is_new,
                    columns,
                    initial_state,
                    STATE0_IS_ROWWISE,
                    DIM,
                    STRIDES[1],
                )
            if state1_ptr is not None:
                _fill_state(
                    state1_ptr,
                    row,
                    is_new,
                    columns,
                    initial_state,
                    STATE1_IS_ROWWISE,
                    DIM,
                    STRIDES[2],
                )
        first_entry += tl.num_programs(0) * BLOCK_ROWS


def launch_initialize_rows(new: RowInitialization) -> None:
    """``torchembed::initialize_rows``; see
    :func:`torchembed.ops.initialize_rows.initialize_rows`."""
    num_rows, dim = new.rows.numel(), new.weight.shape[1]
    if num_rows == 0 or new.weight.numel() == 0:
        return
    states = [state for state in (new.state0, new.state1) if state is not None]
    block = row_block(dim, new.weight.dtype, *(state.dtype for state in states))
    with torch.cuda.device_of(new.rows):
        _initialize_rows_kernel[(min(cdiv(num_rows, block.rows), _MOST_PROGRAMS),)](
            new.weight,
            new.state0,
            new.state1,
            new.rows,
            new.ids,
            new.tables,
            new.num_new,
            new.table_keys,
            new.kinds,
            new.parameters,
            new.first_columns,
            num_rows,
            new.initial_state,
            STATE0_IS_ROWWISE=new.state0 is not None and new.state0.dim() == 1,
            STATE1_IS_ROWWISE=new.state1 is not None and new.state1.dim() == 1,
            DIM=dim,
            STRIDES=tuple(
                0 if tensor is None else tensor.stride(0)
                for tensor in (new.weight, new.state0, new.state1)
            ),
            BLOCK_ROWS=block.rows,
            BLOCK_D=block.columns,
            VECTOR=16 // max(new.weight.itemsize, 4 * bool(states)),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
