"""The slots of a collection while ``torch.compile`` or ``torch.export`` traces it."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures, with_offsets
from torchembed.core.types import OnBadId, Pooling
from torchembed.modules.lookup.feature_selection import bounds_of_features, select_features
from torchembed.modules.traced.traced_lookup import (
    are_looked_up_at_once,
    traced_pooled,
    traced_vectors,
)
from torchembed.modules.traced.traced_missing import traced_missing
from torchembed.modules.traced.traced_rows import traced_rows
from torchembed.ops.row_gradients import WeightGradient
from torchembed.tables import MissingVectors, Table


class _Part(NamedTuple):
    """Slots that one operation looks up."""

    tables: Sequence[Table]
    """All tables of a group, in its order, or one of them."""
    slots: list[int]
    """The numbers of the slots, in the order of their tables."""


class TracedSequences(NamedTuple):
    """The vectors of some slots' ids."""

    slots: list[int]
    features: SparseFeatures
    """One for each slot."""
    vectors: Tensor
    """``[L, D]``."""


class TracedSlots:
    """Slots of a module: slot s looks feature s of a batch up in ``tables[s]``.

    Args:
        feature_names: of each slot, for errors.
        on_bad_id: what becomes of ids that are outside their table.
        form: form of the gradients of weights that no fused optimizer updates.
        is_trained: whether the module is in training mode, in which dynamic tables admit ids.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        feature_names: Sequence[str],
        on_bad_id: OnBadId,
        form: WeightGradient,
        *,
        is_trained: bool,
    ) -> None:
        self._tables, self._feature_names = list(tables), list(feature_names)
        self._on_bad_id, self._form, self._is_trained = on_bad_id, form, is_trained

    def _parts(self) -> list[_Part]:
        parts: list[_Part] = []
        for table in self._tables:
            of_group = table.group.tables
            tables = of_group if are_looked_up_at_once(of_group, self._form) else [table]
            if not any(part.tables[0] is tables[0] for part in parts):
                slots = [
                    slot
                    for member in tables
                    for slot, of_slot in enumerate(self._tables)
                    if of_slot is member
                ]
                parts.append(_Part(tables, slots))
        return parts

    def _rows(self, part: _Part, features: SparseFeatures) -> tuple[Tensor, MissingVectors | None]:
        """The rows of ids of ``part``, numbered through its tables, and the vectors of ids without
        one; None for zeros."""
        tables = [self._tables[slot] for slot in part.slots]
        ends = list(itertools.accumulate([table.num_rows for table in part.tables]))
        first_rows = [
            end - member.num_rows
            for table in tables
            for member, end in zip(part.tables, ends, strict=True)
            if member is table
        ]
        names = [self._feature_names[slot] for slot in part.slots]
        rows = traced_rows(
            features, tables, names, self._on_bad_id, first_rows, is_trained=self._is_trained
        )
        return rows, traced_missing(features, tables, rows)

    def pooled(
        self,
        batch: SparseFeatures,
        poolings: Sequence[Pooling],
        output_dtype: torch.dtype,
        num_reserved: int,
    ) -> Tensor:
        """``[B, num_reserved + sum of dims]``: the pooled vector of each slot, in slot order.

        Args:
            batch: exactly one feature for each slot, in their order.
            poolings: of each slot; equal within a group.
            num_reserved: columns before them, which hold zeros.
        """
        columns: dict[int, Tensor] = {}
        for part in self._parts():
            # The numbers of ids of bags may be variables of the program.
            features = with_offsets(select_features(batch, part.slots))
            rows, missing = self._rows(part, features)
            vectors = traced_pooled(
                part.tables,
                features,
                rows,
                [sum(self._tables[s] is table for s in part.slots) for table in part.tables],
                poolings[part.slots[0]],
                output_dtype,
                self._form,
                missing,
            )
            if not num_reserved and part.slots == list(range(len(self._tables))):
                return vectors.flatten(1)
            columns.update(zip(part.slots, vectors.unbind(1), strict=True))
        parts = [columns[slot] for slot in range(len(self._tables))]
        if num_reserved:
            parts = [parts[0].new_zeros(batch.batch_size, num_reserved), *parts]
        return torch.cat(parts, dim=1)

    def sequences(self, batch: SparseFeatures, output_dtype: torch.dtype) -> list[TracedSequences]:
        """The vector of each id of ``batch``, which has one feature for each slot, in order."""
        found = []
        for part in self._parts():
            features = select_features(batch, part.slots)
            rows, missing = self._rows(part, features)
            vectors = traced_vectors(part.tables, rows, output_dtype, self._form, missing)
            found.append(TracedSequences(part.slots, features, vectors))
        return found


def traced_num_ids(features: SparseFeatures) -> list[int]:
    """The number of ids of each feature, a variable of the program where bags are jagged; Dynamo
    then needs ``torch._dynamo.config.capture_scalar_outputs``."""
    if features.hotness is not None:
        return [count * features.batch_size for count in features.hotness]
    counts = bounds_of_features(features).diff().tolist()
    for count in counts:
        torch._check(count >= 0)
    torch._check(sum(counts) <= features.values.shape[0])
    return counts
