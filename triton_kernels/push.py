"""The Triton kernels of exchanges by push: ranks store into each other's memory, then wait for each
other at a barrier.

Byte floor of an exchange: sent data read once and stored once, over NVLink where it is another
rank's; arrived data read once and written once.

A channel is double-buffered. Exchange number ``epoch`` (1, 2, ...) uses half ``epoch % 2``. A rank
that stores into a half has passed the barrier of the exchange before, so every rank had read the
data that the exchange before that one left in this half. ``state`` int32 ``[2]`` is the number of
exchanges that are over, and 1 once a rank has timed out. Flags and epochs only increase, and wrap
around at ``2 ** 31``; the half is their last bit, since a negative number's remainder is negative.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from torchembed.core import environment
from torchembed.core.types import COPY_FIELDS
from torchembed.triton_kernels.rounding import as_float32, round_to_nearest

_INTERPRETED = tl.constexpr(environment.triton_interpreted())
_NUM_WARPS = 4
_ELEMENTS = 4096
"""Elements that a program copies."""
TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_FIELDS = tl.constexpr(COPY_FIELDS)


@triton.jit
def _converted(value, scale, SCALED: tl.constexpr, DTYPE: tl.constexpr):
    """``value`` times ``scale``, rounded to its own dtype as torch's product is, then to DTYPE."""
    if SCALED:
        value = round_to_nearest(as_float32(value) * scale, value.dtype)
    if value.dtype != DTYPE:
        value = round_to_nearest(as_float32(value), DTYPE)
    return value


@triton.jit(do_not_specialize=["scale"])
def _copy_kernel(
    source_ptr,
    target_ptr,
    copies_ptr,
    state_ptr,
    source_stride,
    half_elements,
    scale,
    PUSHES: tl.constexpr,
    COLLECTS: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy rectangles: ``out[target + i * stride + j] = scale * source[r + i, c + j]`` for each of
    the ``copies``, which are ``(rank, rows, columns, r, c, target, stride)``.

    If PUSHES, ``target_ptr`` holds the addresses of every rank's buffer, and ``out`` is the half of
    the buffer of ``rank`` for the exchange under way. If COLLECTS, ``source`` is the half of this
    rank's buffer for the exchange that is over. With NUM_TERMS, the sum of so many neighbouring
    rectangles is copied, added in float32 and from left to right.

    Example: ``source = [[1, 2], [3, 4]]``, two ranks, ``copies = [(0, 1, 2, 0, 0, 0, 2),
    (1, 1, 1, 1, 1, 3, 2)]``: rank 0's buffer begins with 1 2, and element 3 of rank 1's is 4.
    """
    # The grid is as large as the largest rectangle; programs past the end of theirs do nothing.
    copy = copies_ptr + tl.program_id(0) * _FIELDS
    num_rows = tl.load(copy + 1)
    first = tl.program_id(1) * ROWS
    if first < num_rows:
        # Columns and targets are multiples of VECTOR; told so, the compiler makes accesses as wide.
        num_columns = tl.multiple_of(tl.load(copy + 2), VECTOR)
        row = first + tl.arange(0, ROWS)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        if COLLECTS:
            source_ptr += (tl.load(state_ptr) & 1) * half_elements
        source = source_ptr + (tl.load(copy + 3) + row)[:, None] * source_stride
        source_column = tl.multiple_of(tl.load(copy + 4), VECTOR)
        value = tl.load(source + (source_column + column)[None, :], mask=inside, other=0.0)
        if NUM_TERMS > 1:
            value = as_float32(value)
        for _ in tl.static_range(1, NUM_TERMS):
            source_column = tl.multiple_of(source_column + num_columns, VECTOR)
            addend = tl.load(source + (source_column + column)[None, :], mask=inside, other=0.0)
            value += as_float32(addend)
        value = _converted(value, scale, SCALED, DTYPE)
        if PUSHES:
            out = pushed_to(target_ptr, tl.load(copy), state_ptr, half_elements, DTYPE)
        else:
            out = target_ptr
        out += tl.multiple_of(tl.load(copy + 5), VECTOR)
        stride = tl.multiple_of(tl.load(copy + 6), VECTOR)
        tl.store(out + row[:, None] * stride + column[None, :], value, mask=inside)


@triton.jit
def pushed_to(buffers_ptr, rank, state_ptr, half_elements, DTYPE: tl.constexpr):
    """Pointer to the half of the buffer of ``rank`` for the exchange under way."""
    # The epoch is read on the device, so one captured graph serves both halves.
    address = tl.load(buffers_ptr + rank).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(address, 16) + ((tl.load(state_ptr) + 1) & 1) * half_elements


@triton.jit
def _nanoseconds(before):
    """The GPU's clock in nanoseconds; ``before + 1`` in the interpreter, which has none."""
    if _INTERPRETED:
        return before + 1
    return globaltimer()


@triton.jit(do_not_specialize=["limit_nanoseconds"])
def _barrier_kernel(
    own_flags_ptr,
    flags_ptr,
    state_ptr,
    failed_ptr,
    rank,
    num_ranks,
    limit_nanoseconds,
    BLOCK: tl.constexpr,
):
    """Barrier: tell every rank that this one has stored its part, and wait until each rank has.

    A rank's flags hold the last epoch of every rank. Where one does not arrive in time, the
    exchange ends as if it had, later ones do not wait, and ``failed`` is 1 + the first late rank.

    Example: two ranks, ``state = [4, 0]``: rank 0 stores 5 in ``flags[0]`` of both, waits until its
    own are at least ``[5, 5]``, and leaves ``state = [5, 0]``.
    """
    lane = tl.arange(0, BLOCK)
    inside = lane < num_ranks
    epoch = tl.load(state_ptr) + 1
    # After a time-out no exchange waits again: the host raises, and until then nothing may hang.
    limit = tl.where(tl.load(state_ptr + 1) == 0, limit_nanoseconds, 0)
    theirs = tl.load(flags_ptr + lane, mask=inside, other=0).to(tl.pointer_type(tl.int32))
    # Released system-wide: a peer that sees the flag sees all that earlier kernels stored in its
    # memory.
    tl.atomic_xchg(theirs + rank, epoch, mask=inside, sem="release", scope="sys")
    mine = own_flags_ptr + lane
    start = _nanoseconds(tl.zeros([], tl.int64))
    now = start
    # By differences, since epochs wrap around; a peer may be an exchange ahead. Volatile, since the
    # compiler would otherwise read the flag once.
    is_late = tl.load(mine, mask=inside, other=epoch, volatile=True) - epoch < 0
    while (tl.max(is_late.to(tl.int32), axis=0) > 0) & (now - start < limit):
        is_late = tl.load(mine, mask=inside, other=epoch, volatile=True) - epoch < 0
        now = _nanoseconds(now)
    # Acquires what ranks released by their flags, so that later kernels see their stores.
    tl.atomic_add(mine, 0, mask=inside, sem="acquire", scope="sys")
    if tl.max(is_late.to(tl.int32), axis=0) > 0:
        tl.store(failed_ptr, 1 + tl.min(tl.where(is_late, lane, BLOCK), axis=0))
        tl.store(state_ptr + 1, 1)
    tl.store(state_ptr, epoch)


@triton.jit
def _mean_kernel(
    parts_ptr,
    parts_state_ptr,
    means_ptr,
    means_state_ptr,
    share,
    num_elements,
    half_elements,
    rank,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mean over ranks of this rank's share, stored into every rank's buffer of means.

    ``means[r][rank * share + i] = sum over ranks s of parts[s * share + i] / NUM_RANKS``, in
    float32 and in the order of s.

    Example: two ranks, ``share = 2``, ``parts = [1, 2, 3, 6]``: rank 1 stores 2 4 in elements 2 and
    3 of both.
    """
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < num_elements
    parts = parts_ptr + (tl.load(parts_state_ptr) & 1) * half_elements + offset
    total = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(NUM_RANKS):
        first = tl.cast(share, tl.int64) * source
        total += as_float32(tl.load(parts + first, mask=inside, other=0.0))
    DTYPE: tl.constexpr = parts_ptr.dtype.element_ty
    mean = round_to_nearest(tl.div_rn(total, tl.full([BLOCK], NUM_RANKS, tl.float32)), DTYPE)
    # Each rank begins with the one after it, so that not all store to the same one at a time.
    for distance in tl.static_range(1, NUM_RANKS + 1):
        peer = (rank + distance) % NUM_RANKS
        means = pushed_to(means_ptr, peer, means_state_ptr, half_elements, DTYPE)
        tl.store(means + tl.cast(share, tl.int64) * rank + offset, mean, mask=inside)


def launch_push_rectangles(
    source: Tensor,
    copies: Tensor,
    max_rows: int,
    max_columns: int,
    vector: int,
    buffers: list[Tensor],
    addresses: Tensor,
    state: Tensor,
    scale: float | None,
) -> None:
    """``torchembed::push_rectangles``; see :func:`torchembed.ops.push.push`."""
    _launch_copies(
        *(source, source.stride(0), addresses, copies, max_rows, max_columns, vector),
        *(buffers[0].dtype, state, buffers[0].shape[1]),
        scale=scale,
        pushes=True,
    )


def launch_collect_rectangles(
    buffer: Tensor,
    state: Tensor,
    stride: int,
    copies: Tensor,
    max_rows: int,
    max_columns: int,
    vector: int,
    num_terms: int,
    out: Tensor,
) -> None:
    """``torchembed::collect_rectangles``; see :func:`torchembed.ops.push.collect`."""
    _launch_copies(
        *(buffer, stride, out, copies, max_rows, max_columns, vector),
        *(out.dtype, state, buffer.shape[1]),
        collects=True,
        num_terms=num_terms,
    )


def launch_copy_rectangles(
    source: Tensor, copies: Tensor, max_rows: int, max_columns: int, vector: int, out: Tensor
) -> None:
    """``torchembed::copy_rectangles``; see :func:`torchembed.ops.push.copy_rectangles`."""
    _launch_copies(
        *(source, source.stride(0), out, copies, max_rows, max_columns, vector),
        *(out.dtype, None, 0),
    )


def _launch_copies(
    source: Tensor,
    source_stride: int,
    target: Tensor,
    copies: Tensor,
    max_rows: int,
    max_columns: int,
    vector: int,
    dtype: torch.dtype,
    state: Tensor | None,
    half_elements: int,
    *,
    scale: float | None = None,
    pushes: bool = False,
    collects: bool = False,
    num_terms: int = 1,
) -> None:
    """Launch :func:`_copy_kernel`; ``half_elements`` of a buffer are a multiple of 64."""
    if max_rows == 0 or max_columns == 0:
        return
    columns = min(triton.next_power_of_2(max_columns), 256)
    rows = _ELEMENTS // columns
    grid = (copies.shape[0], triton.cdiv(max_rows, rows), triton.cdiv(max_columns, columns))
    with torch.cuda.device_of(source):
        _copy_kernel[grid](
            source,
            target,
            copies,
            state,
            source_stride,
            half_elements,
            1.0 if scale is None else scale,
            PUSHES=pushes,
            COLLECTS=collects,
            NUM_TERMS=num_terms,
            SCALED=scale is not None,
            DTYPE=TRITON_DTYPES[dtype],
            VECTOR=vector,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=_NUM_WARPS,
        )


def launch_push_barrier(
    flags: list[Tensor],
    addresses: Tensor,
    state: Tensor,
    failed: Tensor,
    rank: int,
    limit_seconds: float,
) -> None:
    """``torchembed::push_barrier``; see :func:`torchembed.ops.push.push_barrier`. ``failed`` may be
    in pinned memory of the host."""
    own_flags, num_ranks = flags[rank], len(flags)
    with torch.cuda.device_of(own_flags):
        _barrier_kernel[(1,)](
            own_flags,
            addresses,
            state,
            failed,
            rank,
            num_ranks,
            int(limit_seconds * 1e9),
            BLOCK=triton.next_power_of_2(num_ranks),
            num_warps=1,
        )


def launch_push_mean(
    parts: Tensor,
    parts_state: Tensor,
    means: list[Tensor],
    addresses: Tensor,
    means_state: Tensor,
    share: int,
    num_elements: int,
    rank: int,
) -> None:
    """``torchembed::push_mean``; see :func:`torchembed.ops.push.push_mean`."""
    if num_elements <= 0:
        return
    with torch.cuda.device_of(parts):
        _mean_kernel[(triton.cdiv(num_elements, _ELEMENTS),)](
            parts,
            parts_state,
            addresses,
            means_state,
            share,
            num_elements,
            parts.shape[1],
            rank,
            NUM_RANKS=len(means),
            BLOCK=_ELEMENTS,
            num_warps=_NUM_WARPS,
        )
