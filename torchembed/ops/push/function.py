"""The public functions of exchanges by push. None has a gradient or makes the host wait for a GPU.

An exchange: every rank calls :func:`push`, :func:`push_pooled_lookup` or :func:`push_mean` any
number of times, then :func:`push_barrier` on its channel once; what arrived may be collected until
the end of the next exchange.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchembed.ops.push.moves import Moves
from torchembed.ops.push.schema import (
    collect_rectangles_op,
    move_rectangles_op,
    push_barrier_op,
    push_mean_op,
    push_pooled_lookup_op,
    push_rectangles_op,
)


class Exchange(NamedTuple):
    """A channel as one of its ranks sees it, where elements of one dtype travel."""

    buffers: list[Tensor]
    """Of each rank ``[2, elements]``, in the dtype that travels; elements are a multiple of 64."""
    addresses: Tensor
    """int64 ``[W]``, where the buffers begin."""
    state: Tensor
    """int32 ``[2]``: exchanges that are over, and 1 once a rank has failed to come."""


def push(source: Tensor, moves: Moves, to: Exchange, scale: float | None = None) -> None:
    """Store rectangles of ``source [rows, columns]`` into the ranks' buffers, in their dtype; each
    product with ``scale`` is rounded to the dtype of ``source`` first.

    Example: ``source = [[1, 2], [3, 4]]``, two ranks, ``moves = [(0, 1, 2, 0, 0, 0, 2),
    (1, 1, 1, 1, 1, 3, 2)]``: rank 0's half begins with 1 2, and element 3 of rank 1's is 4.
    """
    source, bounds = _with_rows(source), (moves.most_rows, moves.most_columns, moves.vector)
    push_rectangles_op(source, moves.on_device(), *bounds, *to, scale)


def push_pooled_lookup(
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    per_id_weights: Tensor | None,
    num_features: int,
    batch_size: int,
    *,
    moves: Moves,
    to: Exchange,
) -> None:
    """Pool sums as :func:`~torchembed.ops.pooled_lookup.pooled_lookup` does, and store them into
    the ranks' buffers in place of returning them.

    Args:
        moves: feature by feature, one for each rank in any order, together of all samples; rows and
            columns are samples and those of the feature's vector.
    """
    push_pooled_lookup_op(
        weight,
        rows,
        offsets,
        hotness,
        per_id_weights,
        num_features,
        batch_size,
        moves.on_device(),
        moves.most_rows,
        moves.most_columns,
        moves.vector,
        *to,
    )


def push_mean(
    arrived: Exchange, means: Exchange, *, share: int, num_elements: int, rank: int
) -> None:
    """Store the mean over ranks of this rank's share of what has arrived into every rank's buffer
    of ``means``: ``means[r][rank * share + i] = sum over ranks s of parts[s * share + i] / W``, in
    float32 and in the order of s.

    Args:
        arrived: parts, in an exchange that is over.
        means: as large a channel, for the coming exchange.
        share: elements of each rank's but the last ones', a multiple of 64.
        num_elements: of this rank's share; none where it is not positive.
    """
    push_mean_op(arrived.buffers[rank], arrived.state, *means, share, num_elements, rank)


def push_barrier(
    flags: Sequence[Tensor],
    addresses: Tensor,
    state: Tensor,
    failed: Tensor,
    *,
    rank: int,
    limit_seconds: float,
) -> None:
    """Tell every rank that this one has stored all of the exchange's, and let the device wait until
    each has: the end of an exchange.

    Where a rank does not come in time, the exchange ends as if it had, and later ones wait no more.

    Args:
        flags: int32 ``[W]`` of each rank, the last epoch of every rank; this rank's is written in
            all of them.
        addresses: int64 ``[W]``, where those begin.
        state: int32 ``[2]`` of this rank; changed.
        failed: int32 ``[1]``, which the host may read; becomes 1 + the first rank that is late.
    """
    push_barrier_op(flags, addresses, state, failed, rank, limit_seconds)


def collect(
    arrived: Exchange, rank: int, stride: int, moves: Moves, out: Tensor, num_terms: int = 1
) -> None:
    """Write rectangles of what arrived at ``rank``, in rows of ``stride`` elements, in the exchange
    that is over, to ``out``; of ``num_terms`` rectangles side by side the sum, in float32 and from
    left to right."""
    buffer, bounds = arrived.buffers[rank], (moves.most_rows, moves.most_columns, moves.vector)
    collect_rectangles_op(buffer, arrived.state, stride, moves.on_device(), *bounds, num_terms, out)


def move(source: Tensor, moves: Moves, out: Tensor) -> None:
    """Write rectangles of ``source [rows, columns]`` to ``out``, which is contiguous, in its
    dtype."""
    source, bounds = _with_rows(source), (moves.most_rows, moves.most_columns, moves.vector)
    move_rectangles_op(source, moves.on_device(), *bounds, out)


def _with_rows(source: Tensor) -> Tensor:
    """``source``, the elements of each row side by side."""
    return source if source.stride(-1) == 1 else source.contiguous()
