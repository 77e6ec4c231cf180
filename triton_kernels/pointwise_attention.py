"""Triton kernels of the ``pointwise_attention_*`` operations: tiles of scores in registers.

Floor of ``L`` rows, ``H`` heads of ``D`` columns, and ``P`` pairs of a row and one of the same
history up to it (``n * (n + 1) / 2`` of a history of n rows). Forward: two products, ``4 P H D``
FLOPs, and ``4 L H D`` elements: three are read and one is written. Backward: five products, ``10 P
H D`` FLOPs, and ``7 L H D`` elements. No float is added atomically, so that bits repeat, and rows
and columns of the scores' gradients are added up in a pass each: seven products, ``14 P H D``
FLOPs, and ``11 L H D`` elements.

2048 histories of 50 rows, one head and 64 columns: 0.67 GFLOP and 105 MB in float32 forward, 2.3
GFLOP and 288 MB backward. At the 67 TFLOP/s and 4.8 TB/s of an H200 that is 22 and 60 us of memory
against 10 and 35 us of arithmetic; histories of 200 rows take 87 and 240 us of memory, 157 and 550
us of arithmetic. Tiles of 32 by 32 compute pairs that do not count, too: 2.4 and 1.4 times as many.

The gradients of biases are partial sums of each program, which torch adds up in an order that their
shape fixes: a float32 for each program and distance, ``1 / BLOCK`` of what scores would take.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.types import LOG_SECONDS_OF_A_BUCKET
from torchembed.triton_kernels.history_blocks import (
    history_rows,
    load_block,
    load_times,
    store_block,
    store_zeros,
)
from torchembed.triton_kernels.launch_sizes import cdiv, next_power_of_2
from torchembed.triton_kernels.rounding import as_float32, round_to_nearest
from torchembed.triton_kernels.row_blocks import index_type_below
from torchembed.triton_kernels.tile_product import add_product

_BUCKETS_PER_LOG_SECOND = tl.constexpr(1 / LOG_SECONDS_OF_A_BUCKET)
_VARYING = ["num_rows", "num_histories"]
"""Numbers of a batch, for which nothing is compiled again."""


class _Tiling(NamedTuple):
    block: int
    """Rows and columns of a tile of scores."""
    num_warps: int
    num_stages: int
    most_registers: int
    """The most registers of a thread. With 128 of them 16 warps fit on a multiprocessor."""


def _tiling(dim: int) -> _Tiling:
    """The tiling for heads of ``dim`` columns, all of which a program holds.

    Small tiles waste little of the triangle of pairs that count. In larger ones float32, which is
    multiplied without tensor cores, does not fit into registers.
    """
    if dim <= 64:
        return _Tiling(32, 4, 2, 128)
    if dim <= 128:
        return _Tiling(32, 8, 2, 128)
    return _Tiling(16, 8, 1, 255)


@triton.jit
def _buckets(next_times, times, NUM_BUCKETS: tl.constexpr):
    """The bucket of each time from one of ``times`` to one of ``next_times``, in seconds: 50 s are
    in bucket ``floor(log(50) / 0.301) = 12``. In float32, whose logarithm is approximate here, some
    times would fall into a neighbouring one."""
    seconds = tl.maximum(tl.abs(next_times - times), 1).to(tl.float64)
    buckets = (tl.log(seconds) * _BUCKETS_PER_LOG_SECOND).to(tl.int32)
    return tl.minimum(buckets, NUM_BUCKETS - 1)


@triton.jit
def _biases(distance_bias_ptr, time_bias_ptr, distances, buckets, mask):
    """Float32 biases of a tile, zeros where not ``mask``."""
    bias = as_float32(tl.load(distance_bias_ptr + distances, mask=mask, other=0.0))
    if time_bias_ptr is not None:
        bias += as_float32(tl.load(time_bias_ptr + buckets, mask=mask, other=0.0))
    return bias


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=_VARYING)
def _pointwise_attention_forward_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    offsets_ptr,
    distance_bias_ptr,
    time_bias_ptr,
    times_ptr,
    next_times_ptr,
    out_ptr,
    num_rows,
    num_histories,
    num_heads,
    max_length,
    query_stride,
    key_stride,
    value_stride,
    NUM_BUCKETS: tl.constexpr,
    DIM: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``out[i] = sum(silu(query[i] . key[j] + bias[i, j]) * value[j]) / max_length`` over ``j <=
    i``, for a block of rows i of a history.

    With one row, ``query = 2``, ``key = 3``, a bias of -6 and ``value = 5``, out is 0; and with a
    second one, for which ``query = 100``, ``key = 1``, ``value = -2``, biases 0 and a
    ``max_length`` of 2, it is ``(300 * 5 - 100 * 2) / 2 = 650``: ``silu(100) = 100`` in float32.
    """
    # The last blocks have the most columns, so they begin first.
    num_pairs = num_histories * num_heads
    first_row = (tl.cdiv(max_length, BLOCK) - 1 - tl.program_id(0) // num_pairs) * BLOCK
    start, length = history_rows(offsets_ptr, num_histories, num_heads, max_length)
    if first_row < length:
        rows = first_row + tl.arange(0, BLOCK)
        query = load_block(
            query_ptr, start, rows, length, query_stride, num_heads, DIM, INDEX, BLOCK_D
        )
        next_times = load_times(next_times_ptr, start, rows, length)
        out = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
        for first_column in range(0, first_row + BLOCK, BLOCK):
            columns = first_column + tl.arange(0, BLOCK)
            key = load_block(
                key_ptr, start, columns, length, key_stride, num_heads, DIM, INDEX, BLOCK_D
            )
            value = load_block(
                value_ptr, start, columns, length, value_stride, num_heads, DIM, INDEX, BLOCK_D
            )
            times = load_times(times_ptr, start, columns, length)
            mask = (columns[None, :] <= rows[:, None]) & (rows < length)[:, None]
            distances = rows[:, None] - columns[None, :]
            buckets = _buckets(next_times[:, None], times[None, :], NUM_BUCKETS)
            scores = _biases(distance_bias_ptr, time_bias_ptr, distances, buckets, mask)
            scores = add_product(query, tl.trans(key), scores, PRECISION)
            weights = tl.where(mask, scores * _sigmoid(scores), 0.0)
            out = add_product(round_to_nearest(weights, value.dtype), value, out, PRECISION)
        store_block(out_ptr, out / max_length, start, rows, length, num_heads, DIM, INDEX, BLOCK_D)
    store_zeros(
        out_ptr,
        offsets_ptr,
        num_rows,
        num_histories,
        num_heads,
        max_length,
        DIM,
        INDEX,
        BLOCK,
        BLOCK_D,
    )


@triton.jit
def _sums_over_diagonals(tile, BLOCK: tl.constexpr):
    """``[BLOCK]`` twice: the sums of ``tile[i, i - d]`` for each d, and of ``tile[i, i - d +
    BLOCK]``, of which the first holds the main diagonal.

    Example: of ``[[1, 2], [3, 4]]`` they are ``[1 + 4, 3]`` and ``[0, 2]``.
    """
    row, distance = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    # Each row is rotated so that a diagonal and the one BLOCK columns further make one column.
    rotated = tl.gather(tile, (row - distance) & (BLOCK - 1), axis=1)
    below = tl.sum(tl.where(row >= distance, rotated, 0.0), axis=0)
    return below, tl.sum(tl.where(row < distance, rotated, 0.0), axis=0)


@triton.jit
def _sums_over_buckets(tile, buckets, mask, NUM_BUCKETS: tl.constexpr, BLOCK_BUCKETS: tl.constexpr):
    """``[BLOCK_BUCKETS]``: the sum of the elements of ``tile`` in each of ``buckets``, where
    ``mask``."""
    numbers = tl.arange(0, BLOCK_BUCKETS)
    sums = tl.zeros((BLOCK_BUCKETS,), dtype=tl.float32)
    first = tl.min(tl.min(tl.where(mask, buckets, NUM_BUCKETS), axis=1), axis=0)
    last = tl.max(tl.max(tl.where(mask, buckets, -1), axis=1), axis=0)
    # One after the other, since atomic additions come in any order. Items long ago are in few.
    for bucket in range(first, last + 1):
        is_here = mask & (buckets == bucket)
        here = tl.sum(tl.sum(tl.where(is_here, tile, 0.0), axis=1), axis=0)
        sums += tl.where(numbers == bucket, here, 0.0)
    return sums


@triton.jit(do_not_specialize=_VARYING)
def _pointwise_attention_rows_backward_kernel(
    grad_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    offsets_ptr,
    distance_bias_ptr,
    time_bias_ptr,
    times_ptr,
    next_times_ptr,
    grad_query_ptr,
    distance_sums_ptr,
    time_sums_ptr,
    num_rows,
    num_histories,
    num_heads,
    max_length,
    query_stride,
    key_stride,
    value_stride,
    NUM_BUCKETS: tl.constexpr,
    DIM: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_BUCKETS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of a block of rows of ``query``, and this program's sums, times ``max_length``,
    of the gradients of scores at each distance and in each bucket.

    A score's gradient is ``(grad[i] . value[j]) * silu'(score)``: with one row, ``query = 2``,
    ``key = 3``, a bias of -6, ``grad = 4``, ``value = 5`` and a ``max_length`` of 1 it is ``20 *
    0.5 = 10``, and that of ``query`` is ``10 * 3 = 30``.
    """
    num_pairs, num_blocks = num_histories * num_heads, tl.cdiv(max_length, BLOCK)
    block = num_blocks - 1 - tl.program_id(0) // num_pairs
    start, length = history_rows(offsets_ptr, num_histories, num_heads, max_length)
    within = tl.arange(0, BLOCK)
    sums_ptr = distance_sums_ptr + tl.program_id(0).to(tl.int64) * (num_blocks * BLOCK) + within
    num_written = 0
    if time_bias_ptr is not None:
        time_sums = tl.zeros((BLOCK_BUCKETS,), dtype=tl.float32)
    if block * BLOCK < length:
        rows = block * BLOCK + within
        query = load_block(
            query_ptr, start, rows, length, query_stride, num_heads, DIM, INDEX, BLOCK_D
        )
        grad = load_block(
            grad_ptr, start, rows, length, num_heads * DIM, num_heads, DIM, INDEX, BLOCK_D
        )
        next_times = load_times(next_times_ptr, start, rows, length)
        grad_query = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
        nearer = tl.zeros((BLOCK,), dtype=tl.float32)
        # From the rows themselves back, so that distances of one block after the other are done.
        for step in range(block + 1):
            columns = (block - step) * BLOCK + within
            key = load_block(
                key_ptr, start, columns, length, key_stride, num_heads, DIM, INDEX, BLOCK_D
            )
            value = load_block(
                value_ptr, start, columns, length, value_stride, num_heads, DIM, INDEX, BLOCK_D
            )
            times = load_times(times_ptr, start, columns, length)
            mask = (columns[None, :] <= rows[:, None]) & (rows < length)[:, None]
            distances = rows[:, None] - columns[None, :]
            buckets = _buckets(next_times[:, None], times[None, :], NUM_BUCKETS)
            scores = _biases(distance_bias_ptr, time_bias_ptr, distances, buckets, mask)
            scores = add_product(query, tl.trans(key), scores, PRECISION)
            sigmoid = _sigmoid(scores)
            slopes = sigmoid * (1.0 + scores * (1.0 - sigmoid))
            grad_scores = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
            grad_scores = add_product(grad, tl.trans(value), grad_scores, PRECISION)
            grad_scores = tl.where(mask, grad_scores * slopes, 0.0)
            rounded = round_to_nearest(grad_scores, key.dtype)
            grad_query = add_product(rounded, key, grad_query, PRECISION)
            further, of_last = _sums_over_diagonals(grad_scores, BLOCK)
            if step > 0:
                tl.store(sums_ptr + (step - 1) * BLOCK, nearer + of_last)
            nearer = further
            if time_bias_ptr is not None:
                time_sums += _sums_over_buckets(
                    grad_scores, buckets, mask, NUM_BUCKETS, BLOCK_BUCKETS
                )
        tl.store(sums_ptr + block * BLOCK, nearer)
        num_written = block + 1
        store_block(
            grad_query_ptr,
            grad_query / max_length,
            start,
            rows,
            length,
            num_heads,
            DIM,
            INDEX,
            BLOCK_D,
        )
    for unused in range(num_written, num_blocks):
        tl.store(sums_ptr + unused * BLOCK, tl.zeros((BLOCK,), dtype=tl.float32))
    if time_bias_ptr is not None:
        numbers = tl.arange(0, BLOCK_BUCKETS)
        time_sums_ptr += tl.program_id(0).to(tl.int64) * NUM_BUCKETS
        tl.store(time_sums_ptr + numbers, time_sums, mask=numbers < NUM_BUCKETS)
    store_zeros(
        grad_query_ptr,
        offsets_ptr,
        num_rows,
        num_histories,
        num_heads,
        max_length,
        DIM,
        INDEX,
        BLOCK,
        BLOCK_D,
    )


@triton.jit(do_not_specialize=_VARYING)
def _pointwise_attention_columns_backward_kernel(
    grad_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    offsets_ptr,
    distance_bias_ptr,
    time_bias_ptr,
    times_ptr,
    next_times_ptr,
    grad_key_ptr,
    grad_value_ptr,
    num_rows,
    num_histories,
    num_heads,
    max_length,
    query_stride,
    key_stride,
    value_stride,
    NUM_BUCKETS: tl.constexpr,
    DIM: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of a block of rows j of ``key`` and ``value``: sums over ``i >= j`` of score
    gradients times ``query[i]``, and of weights of attention times ``grad[i]``.

    With one row, ``query = 2``, ``key = 3``, a bias of -6, ``grad = 4``, ``value = 5`` and a
    ``max_length`` of 1 they are ``10 * 2 = 20`` and ``silu(0) * 4 = 0``.
    """
    # The first blocks have the most rows, and they begin first.
    first_column = tl.program_id(0) // (num_histories * num_heads) * BLOCK
    start, length = history_rows(offsets_ptr, num_histories, num_heads, max_length)
    if first_column < length:
        columns = first_column + tl.arange(0, BLOCK)
        key = load_block(
            key_ptr, start, columns, length, key_stride, num_heads, DIM, INDEX, BLOCK_D
        )
        value = load_block(
            value_ptr, start, columns, length, value_stride, num_heads, DIM, INDEX, BLOCK_D
        )
        times = load_times(times_ptr, start, columns, length)
        grad_key = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
        grad_value = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
        for first_row in range(first_column, length, BLOCK):
            rows = first_row + tl.arange(0, BLOCK)
            query = load_block(
                query_ptr, start, rows, length, query_stride, num_heads, DIM, INDEX, BLOCK_D
            )
            grad = load_block(
                grad_ptr, start, rows, length, num_heads * DIM, num_heads, DIM, INDEX, BLOCK_D
            )
            next_times = load_times(next_times_ptr, start, rows, length)
            # Scores are transposed here, so that both sums take them as left factors.
            mask = (columns[:, None] <= rows[None, :]) & (rows < length)[None, :]
            distances = rows[None, :] - columns[:, None]
            buckets = _buckets(next_times[None, :], times[:, None], NUM_BUCKETS)
            scores = _biases(distance_bias_ptr, time_bias_ptr, distances, buckets, mask)
            scores = add_product(key, tl.trans(query), scores, PRECISION)
            sigmoid = _sigmoid(scores)
            weights = tl.where(mask, scores * sigmoid, 0.0)
            rounded = round_to_nearest(weights, grad.dtype)
            grad_value = add_product(rounded, grad, grad_value, PRECISION)
            slopes = sigmoid * (1.0 + scores * (1.0 - sigmoid))
            grad_scores = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
            grad_scores = add_product(value, tl.trans(grad), grad_scores, PRECISION)
            grad_scores = tl.where(mask, grad_scores * slopes, 0.0)
            rounded = round_to_nearest(grad_scores, query.dtype)
            grad_key = add_product(rounded, query, grad_key, PRECISION)
        store_block(
            grad_key_ptr,
            grad_key / max_length,
            start,
            columns,
            length,
            num_heads,
            DIM,
            INDEX,
            BLOCK_D,
        )
        store_block(
            grad_value_ptr,
            grad_value / max_length,
            start,
            columns,
            length,
            num_heads,
            DIM,
            INDEX,
            BLOCK_D,
        )
    grad_ptrs = (grad_key_ptr, grad_value_ptr)
    for number in tl.static_range(2):
        store_zeros(
            grad_ptrs[number],
            offsets_ptr,
            num_rows,
            num_histories,
            num_heads,
            max_length,
            DIM,
            INDEX,
            BLOCK,
            BLOCK_D,
        )


class _Tensors(NamedTuple):
    """The arguments of the operation that the kernels of forward and of backward both read."""

    query: Tensor
    key: Tensor
    value: Tensor
    offsets: Tensor
    distance_bias: Tensor
    time_bias: Tensor | None
    times: Tensor | None
    next_times: Tensor | None

    def tiling(self) -> _Tiling:
        return _tiling(self.query.shape[2])

    def num_blocks(self) -> int:
        """Blocks of the rows of the longest history."""
        return cdiv(self.distance_bias.numel(), self.tiling().block)

    def num_programs(self) -> int:
        """Programs of a pass: one for each block of rows, history and head that has columns."""
        num_histories = self.offsets.numel() - 1
        return self.num_blocks() * num_histories * self.query.shape[1] * (self.query.shape[2] > 0)

    def num_buckets(self) -> int:
        return 0 if self.time_bias is None else self.time_bias.numel()


def _launch(
    kernel: triton.JITFunction,
    grad: tuple[Tensor, ...],
    tensors: _Tensors,
    *results: Tensor,
    **flags: int,
) -> None:
    """Launch ``kernel`` over the blocks of all histories and heads."""
    query, key, value = tensors[:3]
    num_rows, num_heads, dim = query.shape
    max_length, tiling = tensors.distance_bias.numel(), tensors.tiling()
    strides = query.stride(0), key.stride(0), value.stride(0)
    # Blocks reach beyond the last row of a history, where they are masked.
    reach = (max_length + tiling.block) * max(*strides, num_heads * dim)
    is_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    with torch.cuda.device_of(query):
        kernel[(tensors.num_programs(),)](
            *grad,
            *tensors,
            *results,
            num_rows,
            tensors.offsets.numel() - 1,
            num_heads,
            max_length,
            *strides,
            NUM_BUCKETS=tensors.num_buckets(),
            DIM=dim,
            INDEX=index_type_below(reach),
            BLOCK=tiling.block,
            # tl.dot needs a depth of 16 at least.
            BLOCK_D=max(16, next_power_of_2(dim)),
            PRECISION="tf32" if is_tf32 else "ieee",
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            maxnreg=tiling.most_registers,
            **flags,
        )


def launch_pointwise_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    distance_bias: Tensor,
    time_bias: Tensor | None,
    times: Tensor | None,
    next_times: Tensor | None,
) -> Tensor:
    """``torchembed::pointwise_attention_forward``; see
    :func:`torchembed.ops.pointwise_attention.pointwise_attention`."""
    tensors = _Tensors(query, key, value, offsets, distance_bias, time_bias, times, next_times)
    out = query.new_empty(query.shape)
    if tensors.num_programs():
        _launch(_pointwise_attention_forward_kernel, (), tensors, out)
        return out
    return out.zero_()


def launch_pointwise_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    distance_bias: Tensor,
    time_bias: Tensor | None,
    times: Tensor | None,
    next_times: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``torchembed::pointwise_attention_backward``."""
    tensors = _Tensors(query, key, value, offsets, distance_bias, time_bias, times, next_times)
    grad_query, grad_key, grad_value = (query.new_empty(query.shape) for _ in range(3))
    num_programs, max_length = tensors.num_programs(), distance_bias.numel()
    distances = tensors.num_blocks() * tensors.tiling().block
    distance_sums, time_sums = (
        torch.empty(num_programs, sums, device=query.device, dtype=torch.float32)
        for sums in (distances, tensors.num_buckets())
    )
    if num_programs:
        _launch(
            _pointwise_attention_rows_backward_kernel,
            (grad,),
            tensors,
            grad_query,
            distance_sums,
            time_sums,
            BLOCK_BUCKETS=next_power_of_2(max(tensors.num_buckets(), 1)),
        )
        _launch(
            _pointwise_attention_columns_backward_kernel, (grad,), tensors, grad_key, grad_value
        )
    else:
        for of_rows in (grad_query, grad_key, grad_value):
            of_rows.zero_()
    grad_distance_bias = distance_sums.sum(0)[:max_length] / max_length
    grad_time_bias = query.new_empty(0)
    if time_bias is not None:
        grad_time_bias = (time_sums.sum(0) / max_length).to(time_bias.dtype)
    grad_distance_bias = grad_distance_bias.to(distance_bias.dtype)
    return grad_query, grad_key, grad_value, grad_distance_bias, grad_time_bias
