"""The row index of dynamic tables: ids in hash tables whose slots are the group's rows."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.random_bits import GOLDEN, signed64
from torchembed.core.stand_ins import KeptTensors
from torchembed.core.types import OnBadId
from torchembed.ops.hash_table import (
    Counter,
    HashTables,
    InsertedKeys,
    Policy,
    SlotRange,
    coldest,
    empty_hash_tables,
    erase_if,
    erase_keys,
    find_slots,
    insert_keys,
    table_shape,
    touch_slots,
)
from torchembed.ops.linearize_ids import LinearRows
from torchembed.ops.linearize_ids.reference import id_features
from torchembed.ops.rowwise_update import RoundingKeys
from torchembed.tables.admission_clock import AdmissionClock
from torchembed.tables.admission_filters import AdmissionFilter
from torchembed.tables.deletion_log import DeletionLog
from torchembed.tables.dynamic import LFU, LRU, DecayingLFU, Dynamic, EpochLFU
from torchembed.tables.epoch_times import EpochTimes
from torchembed.tables.expiry import erase_expired
from torchembed.tables.row_index import (
    Admission,
    AdmittedRows,
    IndexedTable,
    NewRows,
    RowIndex,
)
from torchembed.tables.score_decay import decay_scores
from torchembed.tables.slot_windows import SlotWindows

_POLICIES = {
    LRU: Policy.LRU,
    LFU: Policy.LFU,
    DecayingLFU: Policy.LFU,
    EpochLFU: Policy.EPOCH_LFU,
}


def num_slots(capacity: int) -> int:
    """Rows of a dynamic table of ``capacity``: as many, or a few more, so that its buckets are
    equally large."""
    return table_shape(capacity).num_rows


class HashIndex:
    """Each 64-bit integer is an id; an id's row is the slot that the hash table of its table gave
    it.

    Admission inserts ids, and evicts others where it finds no free row. All state is on the device,
    and nothing waits for it.

    Args:
        tables: of the group, in order; each has :func:`num_slots` rows of its capacity.
        dynamic: the policies, of all of them.
        device: where ids come.

    Attributes:
        hash_tables: ids, and the use of their rows.
        clock: numbers the batches that are admitted.
        admission: chooses the new ids that get rows; None: all do.
        deletions: notes the ids that leave the tables; None where no delta is wanted.
    """

    changes_on_admission = True

    def __init__(
        self, tables: Sequence[IndexedTable], dynamic: Dynamic, device: torch.device
    ) -> None:
        self._tables, self._dynamic, self._device = list(tables), dynamic, device
        self._policy = _POLICIES[type(dynamic.eviction)]
        shapes = [table_shape(table.num_rows) for table in tables]
        assert [shape.num_rows for shape in shapes] == [table.num_rows for table in tables]
        self._first_rows = [0]
        for table in tables:
            self._first_rows.append(self._first_rows[-1] + table.num_rows)
        self.hash_tables: HashTables = empty_hash_tables(shapes, self._policy, device)
        self.clock = AdmissionClock(device)
        self.admission: AdmissionFilter | None = None
        if dynamic.admission is not None:
            self.admission = dynamic.admission.build(tables, device)
        self.deletions: DeletionLog | None = None
        if dynamic.deletion_log:
            self.deletions = DeletionLog(dynamic.deletion_log * len(tables), device)
        self._swept: SlotWindows | None = None
        self._times: EpochTimes | None = None
        if dynamic.ttl_seconds is not None:
            self._times = EpochTimes(dynamic.ttl_seconds, dynamic.clock, device)
        if dynamic.ttl_steps is not None or self._times is not None:
            self._swept = SlotWindows(shapes, dynamic.sweep_steps, device)
        self._decayed: SlotWindows | None = None
        if isinstance(dynamic.eviction, DecayingLFU):
            self._decayed = SlotWindows(shapes, dynamic.eviction.steps_per_decay, device)
        self._table_keys = torch.tensor([t.key for t in tables], dtype=torch.int64, device=device)
        self._row_keys: Tensor | None = None
        """int64 ``[R + 1]``: keys of the rounding of rows; None before an update asked for them.
        The last element is none."""

    def for_tables(self, tables: Sequence[int]) -> "HashSlots":
        return HashSlots(self, tables, self._device)

    def find(self, keys: Tensor, tables: Tensor) -> Tensor:
        """The row of each of ``keys [L]``, int64 ``[L]``; -1 for those without one."""
        return find_slots(self.hash_tables, keys, tables)

    def insert(self, keys: Tensor, tables: Tensor, admission: Admission) -> InsertedKeys:
        """Note the use of ``keys [L]``, of ``tables`` int32 ``[L]``, by a batch, and give rows to
        those that have none."""
        state, policy, is_trained = self.hash_tables, self._policy, admission.is_trained
        if admission.epoch is None:
            self.note_time()
        before, eviction = self.clock.last.clone(), self._dynamic.eviction
        epoch = self.clock.admitted(admission)
        epoch_number = None
        if isinstance(eviction, EpochLFU):
            epoch_number = epoch // eviction.steps_per_epoch
        if isinstance(eviction, DecayingLFU) and self._decayed and state.scores is not None:
            # Forwards whose gradients are summed share an epoch.
            happens = epoch > before if is_trained is None else (epoch > before) & is_trained
            decay_scores(state.scores, self._decayed, epoch, eviction.rate, happens)
        slots = find_slots(state, keys, tables)
        touch_slots(
            state,
            slots,
            tables,
            policy=policy,
            epoch=epoch,
            epoch_number=epoch_number,
            is_trained=is_trained,
        )
        released, wanted = self.clock.evictable(epoch), None
        if self._swept is not None:
            newest = torch.minimum(self._newest_expired(epoch), released)
            erase_expired(state, self._swept, epoch, newest, is_trained, self.deletions)
        if self.admission is not None:
            is_new = (tables >= 0) & (slots < 0)
            if is_trained is not None:
                is_new &= is_trained
            wanted = self.admission.admit(keys, tables, is_new, epoch)
        inserted = insert_keys(
            state,
            keys,
            tables,
            slots,
            policy=policy,
            epoch=epoch,
            released=released,
            epoch_number=epoch_number,
            wanted=wanted,
            is_trained=is_trained,
        )
        if self.deletions is not None:
            self.deletions.append(
                inserted.is_evicted,
                inserted.evicted_keys,
                inserted.tables,
                epoch,
                Counter.EVICTED_FULL,
            )
        if self.admission is not None:
            self.admission.forget(inserted.keys, inserted.tables, epoch)
        if self._row_keys is not None:
            self._note_new_keys(self._row_keys, inserted)
        return inserted

    def _newest_expired(self, epoch: Tensor) -> Tensor:
        """int64 ``[1]``: the last epoch whose rows are too old in ``epoch``."""
        limits = [] if self._times is None else [self._times.newest]
        if self._dynamic.ttl_steps is not None:
            limits.append(epoch - self._dynamic.ttl_steps)
        return torch.cat(limits).amax(0, keepdim=True)

    def note_time(self) -> None:
        """Ask the clock, where rows live for some seconds; between steps. Never waits for a GPU."""
        if self._times is not None:
            self._times.note(self.clock.last)

    @property
    def expires_by_time(self) -> bool:
        """True if :meth:`note_time` must be called before each step that is prepared ahead."""
        return self._times is not None

    def evict(self, table: int, num_kept: int) -> None:
        """Evict the ids of least score until at most ``num_kept`` are left; rows in use stay."""
        slots = SlotRange(table, self._first_rows[table], self._tables[table].num_rows)
        released = self.clock.evictable(self.clock.last + 1)
        kept = torch.full((1,), num_kept, dtype=torch.int64, device=self._device)
        erased = erase_if(
            self.hash_tables,
            slots,
            coldest(self.hash_tables, slots, kept, released=released),
            reason=Counter.EVICTED_TARGET,
            epoch=self.clock.last,
            released=released,
        )
        if self.deletions is not None:
            tables = torch.full_like(erased.keys, table)
            self.deletions.append(
                erased.is_erased, erased.keys, tables, self.clock.last, Counter.EVICTED_TARGET
            )

    def erase(self, table: int, keys: Tensor) -> None:
        """Take ``keys [n]`` and their rows out of a table; rows in use stay."""
        tables = torch.full(keys.shape, table, dtype=torch.int32, device=self._device)
        released = self.clock.evictable(self.clock.last + 1)
        slots = erase_keys(self.hash_tables, keys, tables, released=released)
        if self.deletions is not None:
            self.deletions.append(slots >= 0, keys, tables, self.clock.last, Counter.ERASED)

    def release(self, epoch: Tensor) -> None:
        self.clock.release(epoch)

    def release_forwards(self) -> None:
        self.clock.release_forwards()

    def row_ids(self, table: int) -> Tensor:
        """The ids of a table's rows, int64; 0 for free ones."""
        return self._part(self.hash_tables.keys, table)

    def rounding_keys(self) -> RoundingKeys:
        """A key for each row, since ids come in any order; kept up to date by admission."""
        num_rows = self._first_rows[-1]
        if self._row_keys is None:
            self._row_keys = torch.empty(num_rows + 1, dtype=torch.int64, device=self._device)
        self._refresh_row_keys()
        offsets = torch.arange(num_rows + 1, device=self._device)
        columns = None
        if any(table.first_column for table in self._tables):
            of_tables = [torch.full((t.num_rows,), t.first_column) for t in self._tables]
            columns = torch.cat(of_tables).to(self._device)
        return RoundingKeys(offsets, self._row_keys[:num_rows], columns)

    def _refresh_row_keys(self) -> None:
        if self._row_keys is None:
            return
        for number in range(len(self._tables)):
            ids, rows = self.row_ids(number), self._part(self._row_keys, number)
            first = self._first_rows[number]
            numbers = torch.arange(first, first + len(ids), device=self._device)
            rows.copy_(_rounding_keys(self._table_keys[number], ids, numbers))

    def _note_new_keys(self, row_keys: Tensor, new: InsertedKeys) -> None:
        keys = _rounding_keys(self._table_keys[new.tables.long()], new.keys, new.new_slots)
        # Entries that hold no row write to the last element, which is no row's.
        places = torch.where(new.new_slots < 0, len(row_keys) - 1, new.new_slots)
        row_keys.scatter_(0, places, keys)

    def _part(self, tensor: Tensor, table: int) -> Tensor:
        return tensor[self._first_rows[table] : self._first_rows[table + 1]]

    def to(self, device: torch.device) -> "HashIndex":
        """The index on another device; without ids where it comes from the meta device."""
        if device == self._device:
            return self
        made = HashIndex(self._tables, self._dynamic, device)
        if self._device.type != "meta":
            for number in range(len(self._tables)):
                made.load_contents(number, self.contents(number))
            made.clock = self.clock.to(device)
        return made

    def take_table(self, table: int, source: RowIndex, source_table: int) -> None:
        assert isinstance(source, HashIndex)
        if source._device.type == "meta":
            return
        self.load_contents(table, source.contents(source_table))

    def contents(self, table: int) -> dict[str, Tensor]:
        """Views, of a table with rows ``R``: ``ids`` int64 ``[R]``; ``digests`` uint8 ``[R]``, 0 of
        free rows; ``touched`` and, where the policy has them, ``scores``, int64 ``[R]``; and
        ``counters`` int64. ``clock``, int64 ``[1]``, is the epoch of the last batch. What
        :attr:`admission` counts follows."""
        found = {**self._own_contents(table), "clock": self.clock.last}
        return found if self.admission is None else {**found, **self.admission.contents(table)}

    def _own_contents(self, table: int) -> dict[str, Tensor]:
        state = self.hash_tables
        found = {
            "ids": self._part(state.keys, table),
            "digests": self._part(state.digests, table),
            "touched": self._part(state.touched, table),
        }
        if state.scores is not None:
            found["scores"] = self._part(state.scores, table)
        return {**found, "counters": state.counters[table]}

    def load_contents(self, table: int, contents: Mapping[str, Tensor]) -> None:
        if self.deletions is not None:
            self.deletions.begin_anew()
        if self.admission is not None:
            self.admission.load_contents(table, contents)
        for name, own in self._own_contents(table).items():
            own.copy_(contents[name])
        self.clock.go_on_behind(contents["clock"])
        if self._times is not None:
            self._times.forget()
        self._refresh_row_keys()


def _rounding_keys(table_key: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """The keys under which rows of the group draw what their ids draw, int64;
    see :func:`~torchembed.tables.shifted_row_key`."""
    return table_key + (ids - rows) * signed64(GOLDEN)


class HashSlots:
    """Slots whose tables are those of a :class:`HashIndex`.

    Args:
        index: of the group.
        tables: for each slot the number of its table in the group.
        device: where ids come.
    """

    def __init__(self, index: HashIndex, tables: Sequence[int], device: torch.device) -> None:
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
        """The rows of the ids that have one; no id is bad."""
        rows = self._index.find(features.values, self._tables_of(features, is_valid))
        none_bad = torch.full((1,), rows.numel(), dtype=torch.int64, device=rows.device)
        return LinearRows(rows.to(rows_dtype), none_bad)

    def admit(
        self,
        features: SparseFeatures,
        rows: Tensor,
        admission: Admission,
        is_valid: Tensor | None = None,
    ) -> AdmittedRows:
        """Insert what has no row; ``rows`` may have changed since they were found."""
        tables = self._tables_of(features, is_valid)
        inserted = self._index.insert(features.values, tables, admission)
        new = NewRows(inserted.new_slots, inserted.keys, inserted.tables)
        return AdmittedRows(inserted.slots.to(rows.dtype), new)


_NUM_FORMS = 16
"""The most forms of fixed hotness whose tables of positions are kept."""


@dataclasses.dataclass(frozen=True)
class HashFactory:
    """Makes :class:`HashIndex`."""

    dynamic: Dynamic

    takes_any_id = True

    def rows_for(self, capacity: int) -> int:
        return num_slots(capacity)

    def bytes_for(self, num_rows: int) -> int:
        """Ids, digests, epochs of the last use and, but for LRU, scores; what chooses the ids that
        get rows; and the log of those that left."""
        has_scores = _POLICIES[type(self.dynamic.eviction)] is not Policy.LRU
        admission = self.dynamic.admission
        counts = 0 if admission is None else admission.bytes_for(num_rows)
        logged = self.dynamic.deletion_log * DeletionLog.ENTRY_BYTES
        return num_rows * (8 + 1 + 8 + (8 if has_scores else 0)) + counts + logged

    def __call__(self, tables: Sequence[IndexedTable], device: torch.device) -> HashIndex:
        return HashIndex(tables, self.dynamic, device)
