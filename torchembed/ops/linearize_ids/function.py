"""The public function ``linearize_ids``."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.types import OnBadId
from torchembed.ops.bags import hotness_of_bags
from torchembed.ops.linearize_ids.schema import linearize_ids_op, locate_bad_id_op


class LinearRows(NamedTuple):
    """Result of :func:`linearize_ids`."""

    rows: Tensor
    """``[L]``, int32 or int64: rows of the group's flat weight, -1 where there is none."""
    first_bad: Tensor
    """``[1]``, int64: the smallest position of an id outside its table, L where all are inside."""


def linearize_ids(
    values: Tensor,
    first_rows: Tensor,
    num_rows: Tensor,
    *,
    offsets: Tensor | None = None,
    hotness: Sequence[int] | None = None,
    batch_size: int,
    on_bad_id: OnBadId = OnBadId.RAISE,
    rows_dtype: torch.dtype = torch.int64,
) -> LinearRows:
    """Turn each feature's ids into rows of one flat weight that holds all the features' tables.

    ``rows[p] = first_rows[f] + values[p]`` for position ``p`` of feature ``f``. An id outside
    ``[0, num_rows[f])`` becomes -1 (``RAISE``, ``ZERO``) or the nearest valid id (``CLAMP``); this
    function itself never raises for one, its caller reads ``first_bad``. Positions from
    ``offsets[-1]`` on belong to no bag: they become -1 and are never bad. Never synchronizes.

    Args:
        values: ids, int32 or int64, ``[L]``, feature-major.
        first_rows: int64 ``[F]``, the first row of each feature's table.
        num_rows: int64 ``[F]``, the rows of each feature's table.
        offsets: ``[F * batch_size + 1]`` for jagged bags; else
        hotness: ids a bag for each feature.
        rows_dtype: int32 where the flat weight has fewer than 2**31 rows, else int64.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    return LinearRows(
        *linearize_ids_op(
            values.contiguous(),
            None if offsets is None else offsets.contiguous(),
            hotness_of_bags(offsets, hotness),
            first_rows.contiguous(),
            num_rows.contiguous(),
            batch_size,
            int(on_bad_id),
            rows_dtype,
        )
    )


def locate_bad_id(
    values: Tensor, first_bad: Tensor, bounds: Tensor | None, location: Tensor
) -> None:
    """Write which id is the ``first_bad`` to ``location``: its position and its value and, where
    ``bounds`` are given, its feature and the position of that feature's first id.

    Where no id is bad, only the position, ``L``, has a meaning. Never synchronizes.

    Args:
        values: ids, int32 or int64, ``[L]``, at least one.
        first_bad: as :func:`linearize_ids` gives it.
        bounds: ``[F + 1]``, int32 or int64: where the ids of each feature begin, and end.
        location: int64 ``[2]``, with ``bounds`` ``[4]``; changed. On the device of ``values``, or
            for a GPU in pinned memory of the host, which must be kept until the GPU has written.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    locate_bad_id_op(values.contiguous(), first_bad, bounds, location)
