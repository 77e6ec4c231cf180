"""Ids of a batch, checked against whole tables before they are sent to the ranks of their rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.stand_ins import KeptTensors
from torchembed.core.types import OnBadId
from torchembed.ops.linearize_ids import LinearRows, linearize_ids
from torchembed.ops.linearize_ids.reference import id_features

_NUM_FORMS = 16
"""The most forms of fixed hotness whose masks are kept."""


class IdChecks:
    """Checks the ids of a sequence of slots, each of which looks up one table.

    Args:
        num_ids: of each slot: ids of its table are in ``[0, num_ids)``; None where they are any
            integers, so that none is bad, and -1 is one of them.
        device: where ids come.

    Attributes:
        dtype: of checked ids: int64 where a table takes any id, or more than int32 has.
    """

    def __init__(self, num_ids: Sequence[int | None], device: torch.device) -> None:
        self.device = device
        is_narrow = all(number is not None and number <= 2**31 for number in num_ids)
        self.dtype = torch.int32 if is_narrow else torch.int64
        # What stands for ids of tables that take any is 0, which is inside then.
        limits = [1 if number is None else number for number in num_ids]
        self._num_ids = torch.tensor(limits, dtype=torch.int64, device=device)
        self._first_rows = torch.zeros_like(self._num_ids)
        is_free = [number is None for number in num_ids]
        # Behind the last bag there is one more slot.
        self._takes_any = torch.tensor([*is_free, False], device=device) if any(is_free) else None
        self._masks: KeptTensors[object, Tensor] = KeptTensors(_NUM_FORMS)
        """Masks by hotness and batch size; kept, since captured steps read them."""

    def free_positions(self, features: SparseFeatures) -> Tensor | None:
        """bool ``[L]``, True for ids of tables that take any; None where no table does."""
        takes_any, hotness = self._takes_any, features.hotness
        if takes_any is None:
            return None
        size = features.batch_size, features.values.numel(), features.values.device

        def find() -> Tensor:
            return takes_any[id_features(features.offsets, list(hotness or ()), *size)]

        return find() if hotness is None else self._masks.get((hotness, *size), find)

    def __call__(self, features: SparseFeatures, on_bad_id: OnBadId) -> LinearRows:
        """The ids of ``features``, one for each slot, with -1 (or the nearest id) for each that is
        outside its table, and the first position of such a one. Never waits for a GPU."""
        values, is_free = features.values, self.free_positions(features)
        ids, first_bad = linearize_ids(
            values if is_free is None else values.masked_fill(is_free, 0),
            self._first_rows,
            self._num_ids,
            offsets=features.offsets,
            hotness=features.hotness,
            batch_size=features.batch_size,
            on_bad_id=on_bad_id,
            rows_dtype=self.dtype,
        )
        if is_free is None:
            return LinearRows(ids, first_bad)
        return LinearRows(torch.where(is_free, values.to(self.dtype), ids), first_bad)
