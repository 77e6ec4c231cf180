"""The public functions of exchanges by push. None has a gradient or makes the host wait for a GPU.

An exchange: every rank calls :func:`push`, :func:`push_pooled_lookup` or :func:`push_mean` any
number of times, then :func:`push_barrier` on its channel once. The data that arrived may be
collected until the end of the next exchange.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchembed.core.copies.rectangles import RectangleCopies
from torchembed.ops.push.schema import (
    collect_rectangles_op,
    copy_rectangles_op,
    push_barrier_op,
    push_mean_op,
    push_pooled_lookup_op,
    push_rectangles_op,
)


class Exchange(NamedTuple):
    """View of a channel by one of its ranks, for elements of one dtype."""

    buffers: list[Tensor]
    """Buffer of each rank, ``[2, elements]`` in the dtype that is sent: two halves, whose elements
    are a multiple of 64."""
    addresses: Tensor
    """Addresses of the buffers, int64 ``[W]``."""
    state: Tensor
    """int32 ``[2]``: the number of exchanges that are over, and 1 once a rank has timed out."""


def push(source: Tensor, copies: RectangleCopies, to: Exchange, scale: float | None = None) -> None:
    """Store rectangles of ``source [rows, columns]`` into the ranks' buffers, in their dtype; each
    product with ``scale`` is rounded to the dtype of ``source`` first.

    Example: ``source = [[1, 2], [3, 4]]``, two ranks, ``copies = [(0, 1, 2, 0, 0, 0, 2),
    (1, 1, 1, 1, 1, 3, 2)]``: rank 0's half begins with 1 2, and element 3 of rank 1's is 4.
    """
    source, bounds = _with_rows(source), (copies.max_rows, copies.max_columns, copies.vector)
    push_rectangles_op(source, copies.on_device(), *bounds, *to, scale)


def push_pooled_lookup(
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    per_id_weights: Tensor | None,
    num_features: int,
    batch_size: int,
    *,
    copies: RectangleCopies,
    to: Exchange,
) -> None:
    """Pool sums as :func:`~torchembed.ops.pooled_lookup.pooled_lookup` does, and store them into
    the ranks' buffers in place of returning them.

    Args:
        copies: for each feature one copy for each rank, in any order, which cover all samples
            between them; rows are samples, and columns those of the feature's vector.
    """
    push_pooled_lookup_op(
        weight,
        rows,
        offsets,
        hotness,
        per_id_weights,
        num_features,
        batch_size,
        copies.on_device(),
        copies.max_rows,
        copies.max_columns,
        copies.vector,
        *to,
    )


def push_mean(
    arrived: Exchange, means: Exchange, *, share: int, num_elements: int, rank: int
) -> None:
    """Store the mean over ranks of this rank's share of the parts that arrived into every rank's
    buffer of ``means``.

    ``means[r][rank * share + i] = sum over ranks s of parts[s * share + i] / W``, in float32 and in
    the order of s.

    Args:
        arrived: the parts, in an exchange that is over.
        means: a channel as large, for the coming exchange.
        share: elements of each rank's share, a multiple of 64; the last ranks may have fewer.
        num_elements: elements of this rank's share; none where it is not positive.
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
    """Barrier on the device that ends an exchange: it returns once every rank has stored its part.

    Where a rank does not arrive in time, the exchange ends as if it had, and later ones do not
    wait.

    Args:
        flags: int32 ``[W]`` of each rank: the last epoch that each rank has finished. This rank
            writes its own entry in all of them.
        addresses: addresses of the flags, int64 ``[W]``.
        state: int32 ``[2]`` of this rank; changed.
        failed: int32 ``[1]``, which the host may read; becomes 1 + the first rank that is late.
        limit_seconds: how long the device waits.
    """
    push_barrier_op(flags, addresses, state, failed, rank, limit_seconds)


def collect(
    arrived: Exchange,
    rank: int,
    stride: int,
    copies: RectangleCopies,
    out: Tensor,
    num_terms: int = 1,
) -> None:
    """Copy rectangles that arrived at ``rank`` in the exchange that is over to ``out``.

    Args:
        stride: elements of a row of the buffer.
        num_terms: neighbouring rectangles that are added up for each copy, in float32 and from left
            to right.
    """
    buffer, bounds = arrived.buffers[rank], (copies.max_rows, copies.max_columns, copies.vector)
    collect_rectangles_op(
        buffer, arrived.state, stride, copies.on_device(), *bounds, num_terms, out
    )


def copy_rectangles(source: Tensor, copies: RectangleCopies, out: Tensor) -> None:
    """Copy rectangles of ``source [rows, columns]`` to ``out``, which is contiguous, in its
    dtype."""
    source, bounds = _with_rows(source), (copies.max_rows, copies.max_columns, copies.vector)
    copy_rectangles_op(source, copies.on_device(), *bounds, out)


def _with_rows(source: Tensor) -> Tensor:
    """``source`` with the elements of each row contiguous."""
    return source if source.stride(-1) == 1 else source.contiguous()
