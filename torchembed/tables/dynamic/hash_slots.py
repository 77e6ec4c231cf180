"""Routing of features to rows of hash tables, by the table that each slot looks up."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.stand_ins import KeptTensors
from torchembed.core.types import OnBadId
from torchembed.ops.hash_table import int64_keys
from torchembed.ops.linearize_ids import LinearRows
from torchembed.ops.linearize_ids.reference import id_features
from torchembed.tables.row_index import Admission, AdmittedRows, NewRows

if TYPE_CHECKING:
    from torchembed.tables.dynamic.hash_index import HashIndex

_NUM_FORMS = 16
"""The most forms of fixed hotness whose tables of positions are kept."""


class HashSlots:
    """Slots whose tables are those of a :class:`HashIndex`.

    Args:
        index: of the group.
        tables: for each slot the number of its table in the group.
        device: where ids come.
    """

    def __init__(self, index: "HashIndex", tables: Sequence[int], device: torch.device) -> None:
        self._index, self._num_slots = index, len(tables)
        # Positions behind the last bag are of one slot more, which has no table.
        self._numbers = torch.tensor([*tables, -1], dtype=torch.int32, device=device)
        self._of_forms: KeptTensors[object, Tensor] = KeptTensors(_NUM_FORMS)
        """The tables of positions by hotness and batch size; kept, since captured steps read them.
        """

    def _tables_of(self, features: SparseFeatures, is_valid: Tensor | None) -> Tensor:
        """The table of each position, int32 ``[L]``; -1 where there is no id."""
        values, hotness = features.values, features.hotness
        size = features.batch_size, values.numel(), values.device

        def find() -> Tensor:
            return self._numbers[id_features(features.offsets, list(hotness or ()), *size)]

        tables = find() if hotness is None else self._of_forms.get((hotness, *size), find)
        return tables if is_valid is None else tables.masked_fill(~is_valid, -1)

    def route(
        self,
        features: SparseFeatures,
        on_bad_id: OnBadId,
        rows_dtype: torch.dtype,
        is_valid: Tensor | None = None,
    ) -> LinearRows:
        """The rows of the ids that have one, or share one; no id is bad."""
        tables = self._tables_of(features, is_valid)
        rows = self._with_shared(self._index.find(features.values, tables), features.values, tables)
        none_bad = torch.full((1,), rows.numel(), dtype=torch.int64, device=rows.device)
        return LinearRows(rows.to(rows_dtype), none_bad)

    def admit(
        self,
        features: SparseFeatures,
        rows: Tensor | None,
        admission: Admission,
        is_valid: Tensor | None = None,
    ) -> AdmittedRows:
        """Insert what has no row; ``rows`` may have changed since they were found, so that all are
        found anew."""
        tables = self._tables_of(features, is_valid)
        inserted = self._index.insert(features.values, tables, admission)
        new = NewRows(inserted.new_slots, inserted.keys, inserted.tables, inserted.num_new)
        slots = self._with_shared(inserted.slots, features.values, tables)
        return AdmittedRows(slots, new)

    def _with_shared(self, rows: Tensor, ids: Tensor, tables: Tensor) -> Tensor:
        """``rows [L]`` with those that ids without one of their own share."""
        shared = self._index.shared
        return rows if shared is None else shared.rows(rows, int64_keys(ids), tables)

    def tables_of_missing(
        self, features: SparseFeatures, rows: Tensor, is_valid: Tensor | None = None
    ) -> Tensor:
        return self._tables_of(features, is_valid).masked_fill(rows >= 0, -1)
