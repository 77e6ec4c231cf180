"""Row indices for tests, on a CPU: one that notes what it is told, and one over a Python dict."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import torchembed
from torchembed import SparseFeatures
from torchembed.core.types import OnBadId
from torchembed.ops.linearize_ids import LinearRows
from torchembed.ops.linearize_ids.reference import id_features
from torchembed.ops.rowwise_update import RoundingKeys
from torchembed.tables import (
    Admission,
    AdmittedRows,
    IndexedTable,
    RangeIndex,
    TableSpec,
    shifted_row_key,
)
from torchembed.tables.row_index import RangeSlots, RowIndex


class LoggedAdmission(NamedTuple):
    ids: list[int]
    is_trained: bool
    epoch: int | None


class RecordingIndex(RangeIndex):
    """A range whose admissions are noted, in ``admissions``, and released epochs, in
    ``released``."""

    changes_on_admission = True

    def __init__(self, tables: Sequence[IndexedTable], device: torch.device) -> None:
        super().__init__(tables, device)
        self.admissions: list[LoggedAdmission] = []
        self.released: list[int] = []

    def for_tables(self, tables: Sequence[int]) -> "RecordingSlots":
        firsts = [self._first_rows[number] for number in tables]
        counts = [self._tables[number].num_rows for number in tables]
        slots = RecordingSlots(firsts, counts, self._device)
        slots.admissions = self.admissions
        return slots

    def release(self, epoch: Tensor, *, keeps_rows: bool = False) -> None:
        self.released.append(int(epoch))


class RecordingSlots(RangeSlots):
    admissions: list[LoggedAdmission]

    def admit(
        self,
        features: SparseFeatures,
        rows: Tensor | None,
        admission: Admission,
        is_valid: Tensor | None = None,
    ) -> AdmittedRows:
        is_trained, epoch, _ = admission
        assert rows is not None
        # Padded batches have spare ids behind their bags.
        num_ids = rows.numel() if features.offsets is None else int(features.offsets[-1])
        self.admissions.append(
            LoggedAdmission(
                features.values[:num_ids].tolist(),
                is_trained is None or bool(is_trained),
                None if epoch is None else int(epoch),
            )
        )
        return AdmittedRows(rows)


class DictIndex:
    """Any 64-bit integer is an id. Admission gives each new one the next free row of its table;
    nothing is evicted."""

    changes_on_admission = True

    def __init__(self, tables: Sequence[IndexedTable], device: torch.device) -> None:
        self.tables, self.device = list(tables), device
        self.rows: list[dict[int, int]] = [{} for _ in tables]
        self.first_rows = [0]
        for table in tables:
            self.first_rows.append(self.first_rows[-1] + table.num_rows)

    def for_tables(self, tables: Sequence[int]) -> "DictSlots":
        return DictSlots(self, list(tables))

    def release(self, epoch: Tensor, *, keeps_rows: bool = False) -> None:
        """Nothing is evicted."""

    def release_forwards(self, *, keeps_rows: bool = False) -> None:
        """Nothing is evicted."""

    def uninitialized_rows(self) -> None:
        """No exception comes between."""

    def note_initialized(self) -> None:
        """No exception comes between."""

    def set_row_bytes(self, row_bytes: Sequence[int]) -> None:
        """Nothing is evicted."""

    def contents(self, table: int) -> dict[str, Tensor]:
        return {}

    def load_contents(self, table: int, contents: Mapping[str, Tensor]) -> None:
        """Nothing is kept."""

    def row_ids(self, table: int) -> Tensor:
        # As if each row that is free held the id of its number.
        ids = torch.arange(self.tables[table].num_rows)
        for row_id, row in self.rows[table].items():
            ids[row] = row_id
        return ids

    def rounding_keys(self) -> RoundingKeys:
        keys = [
            shifted_row_key(held.key, row_id - first - row)
            for number, (held, first) in enumerate(zip(self.tables, self.first_rows, strict=False))
            for row, row_id in enumerate(self.row_ids(number).tolist())
        ]
        row_offsets = torch.arange(self.first_rows[-1] + 1)
        return RoundingKeys(row_offsets, torch.tensor(keys, dtype=torch.int64))

    def to(self, device: torch.device) -> "DictIndex":
        return self

    def take_table(self, table: int, source: RowIndex, source_table: int) -> None:
        assert isinstance(source, DictIndex)
        self.rows[table] = source.rows[source_table]


class DictSlots:
    def __init__(self, index: DictIndex, tables: list[int]) -> None:
        self.index, self.tables = index, tables

    def _found(
        self, features: SparseFeatures, is_valid: Tensor | None, *, inserts: bool
    ) -> list[int]:
        index, ids = self.index, features.values.tolist()
        slots = id_features(
            features.offsets,
            list(features.hotness or ()),
            features.batch_size,
            len(ids),
            features.values.device,
        )
        valid = [True] * len(ids) if is_valid is None else is_valid.tolist()
        found = []
        for row_id, slot, is_id in zip(ids, slots.tolist(), valid, strict=True):
            row = -1
            if is_id and slot < len(self.tables):
                table = self.tables[slot]
                rows = index.rows[table]
                if inserts and row_id not in rows and len(rows) < index.tables[table].num_rows:
                    rows[row_id] = len(rows)
                if row_id in rows:
                    row = index.first_rows[table] + rows[row_id]
            found.append(row)
        return found

    def route(
        self,
        features: SparseFeatures,
        on_bad_id: OnBadId,
        rows_dtype: torch.dtype,
        is_valid: Tensor | None = None,
    ) -> LinearRows:
        rows = self._found(features, is_valid, inserts=False)
        none_bad = torch.tensor([len(rows)])
        return LinearRows(torch.tensor(rows, dtype=rows_dtype), none_bad)

    def admit(
        self,
        features: SparseFeatures,
        rows: Tensor | None,
        admission: Admission,
        is_valid: Tensor | None = None,
    ) -> AdmittedRows:
        trains = admission.is_trained is None or bool(admission.is_trained)
        found = self._found(features, is_valid, inserts=trains)
        return AdmittedRows(torch.tensor(found, dtype=torch.int64))


class _FixedRows:
    """The numbers of rows of factories whose indices never grow."""

    grows = False
    moved_row_bytes = 0

    def rows_for(self, capacity: int) -> int:
        return capacity

    def rows_of_part(self, num_rows: int, num_parts: int) -> int:
        return -(-num_rows // num_parts)

    def initial_rows(self, num_rows: int, of_rows: int) -> int:
        return num_rows

    def added_rows(self, num_rows: int, of_rows: int) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class DictFactory(_FixedRows):
    """Makes :class:`DictIndex`."""

    takes_any_id = True

    def bytes_for(self, num_rows: int) -> int:
        """As if each row had an id of 8 bytes."""
        return 8 * num_rows

    def __call__(self, tables: Sequence[IndexedTable], device: torch.device) -> DictIndex:
        return DictIndex(tables, device)


@dataclasses.dataclass(frozen=True)
class RecordingFactory(_FixedRows):
    """Makes :class:`RecordingIndex`."""

    takes_any_id = False

    def bytes_for(self, num_rows: int) -> int:
        return 0

    def __call__(self, tables: Sequence[IndexedTable], device: torch.device) -> RecordingIndex:
        return RecordingIndex(tables, device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordingBagConfig(torchembed.EmbeddingBagConfig):
    """A table with a :class:`RecordingIndex`."""

    def spec(self, seed: int) -> TableSpec:
        return dataclasses.replace(super().spec(seed), index=RecordingFactory())


@dataclasses.dataclass(frozen=True, kw_only=True)
class DictBagConfig(torchembed.EmbeddingBagConfig):
    """A table with a :class:`DictIndex`."""

    def spec(self, seed: int) -> TableSpec:
        return dataclasses.replace(super().spec(seed), index=DictFactory())


@dataclasses.dataclass(frozen=True, kw_only=True)
class DictConfig(torchembed.EmbeddingConfig):
    """A table with a :class:`DictIndex`."""

    def spec(self, seed: int) -> TableSpec:
        return dataclasses.replace(super().spec(seed), index=DictFactory())
