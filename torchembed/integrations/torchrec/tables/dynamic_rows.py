"""Rows of the ids that a kernel of dynamic tables is given, where no pipeline prepared them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.types import OnBadId
from torchembed.tables import MissingVectors, RowIndex, SlotIndex, Table, TableGroup, TableSet


class DynamicRows:
    """Finds the rows of ids in dynamic tables, and gives rows to new ids in training.

    Args:
        groups: of all tables of the kernel; each id has a row in one of them at most.
        tables: of the kernel, in TorchRec's order.
        feature_tables: for each feature, the index of its table.
        rows_dtype: of rows of all groups.
    """

    def __init__(
        self,
        groups: Sequence[TableGroup],
        tables: Sequence[Table],
        feature_tables: Sequence[int],
        rows_dtype: torch.dtype,
    ) -> None:
        self._groups, self._rows_dtype = groups, rows_dtype
        self._table_set = TableSet.over(groups)
        self._keys = tuple(map(str, range(len(feature_tables))))
        looked_up = [tables[number] for number in feature_tables]
        # In each group features of other groups' tables have none, and their ids no row.
        self._numbers = [
            [group.tables.index(t) if t in group.tables else -1 for t in looked_up]
            for group in groups
        ]
        self._slots: list[tuple[RowIndex, SlotIndex] | None] = [None] * len(groups)

    def reset(self) -> None:
        """Give rows that ids share, and those of the ids in the tables, their initial values."""
        self._table_set.fill_initial_rows()

    def find(self, ids: Tensor, offsets: Tensor, batch_size: int, *, is_trained: bool) -> Tensor:
        """The row of each of ``ids [L]`` in its group, -1 for ids without one.

        Args:
            is_trained: whether new ids get rows, and the use of the others is noted.
        """
        features = self._features(ids, offsets, batch_size)
        found: Tensor | None = None
        for number, group in enumerate(self._groups):
            slots = self._slots_of(number)
            if is_trained:
                rows = group.admit(slots, features, None).to(self._rows_dtype)
            else:
                rows = slots.route(features, OnBadId.ZERO, self._rows_dtype).rows
            found = rows if found is None else torch.maximum(found, rows)
        assert found is not None
        return found

    def missing(
        self, ids: Tensor, offsets: Tensor, batch_size: int, rows: Tensor
    ) -> list[MissingVectors | None]:
        """The vectors of each group's ids that have none of the ``rows`` that :meth:`find` gave;
        None for a group where they are zeros."""
        features = self._features(ids, offsets, batch_size)
        return [
            group.missing_vectors(self._slots_of(number), features, rows)
            if group.reads_missing
            else None
            for number, group in enumerate(self._groups)
        ]

    def _features(self, ids: Tensor, offsets: Tensor, batch_size: int) -> SparseFeatures:
        return SparseFeatures(keys=self._keys, values=ids, batch_size=batch_size, offsets=offsets)

    def _slots_of(self, number: int) -> SlotIndex:
        index, known = self._groups[number].index, self._slots[number]
        if known is None or known[0] is not index:
            known = index, index.for_tables(self._numbers[number])
            self._slots[number] = known
        return known[1]
