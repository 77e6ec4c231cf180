"""The row index of dynamic tables: ids in hash tables whose slots are the group's rows."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.ops.hash_table import (
    Counter,
    HashTables,
    InsertedKeys,
    Policy,
    assign_scores,
    coldest,
    empty_hash_tables,
    erase_if,
    erase_keys,
    find_slots,
    grow,
    insert_keys,
    int64_keys,
    slot_ranges,
    touch_slots,
)
from torchembed.ops.rowwise_update import RoundingKeys
from torchembed.tables.admission_clock import AdmissionClock
from torchembed.tables.deferred_interrupts import interrupts_deferred
from torchembed.tables.dynamic.admission_filters import AdmissionFilter
from torchembed.tables.dynamic.caller_scores import StepScores
from torchembed.tables.dynamic.deletion_log import DeletionLog
from torchembed.tables.dynamic.erasing_step import ErasingStep
from torchembed.tables.dynamic.expiry import Expiry
from torchembed.tables.dynamic.growth_demand import GrowthDemand
from torchembed.tables.dynamic.hash_shapes import capacities_of, shapes_of
from torchembed.tables.dynamic.hash_slots import HashSlots
from torchembed.tables.dynamic.hashed_rows import SharedRows
from torchembed.tables.dynamic.id_rounding_keys import IdRoundingKeys
from torchembed.tables.dynamic.policies import Dynamic, EpochLFU, policy_of, score_numbers
from torchembed.tables.dynamic.row_bounds import RowBounds
from torchembed.tables.dynamic.score_decay import ScoreDecay
from torchembed.tables.dynamic.unfinished_insertion import UnfinishedInsertion
from torchembed.tables.row_index import Admission, IndexedTable, NewRows, RowIndex, max_rows_of


class GrownIndex(NamedTuple):
    """The state of a :class:`HashIndex` with more rows, made by :meth:`HashIndex.grown`."""

    tables: list[IndexedTable]
    hash_tables: HashTables
    new_slots: Tensor
    """int64 ``[R]``: the new row of each old one that has an id, -1 of free ones."""
    expiry: Expiry | None
    decay: ScoreDecay | None
    row_keys: IdRoundingKeys


class HashIndex:
    """Each 64-bit integer is an id; an id's row is the slot that the hash table of its table gave
    it.

    Admission inserts ids, and evicts others where it finds no free row. All state is on the device,
    and nothing waits for it.

    Args:
        tables: of the group, in order; each with the rows of a :class:`TableShape`.
        dynamic: the policies, of all of them.
        device: where ids come.

    Attributes:
        hash_tables: ids, and the use of their rows.
        shared: gives rows to ids that have none of their own; None: they read none.
        clock: numbers the batches that are admitted.
        admission: chooses the new ids that get rows; None: all do.
        deletions: notes the ids that leave the tables; None where no delta is wanted.
        step_scores: the scores that batches give to their ids; None but under
            :class:`CallerScores`.
        demand: the rows that the tables will need; None where they have all of theirs.
        has_forwards_under_way: True if forwards have admitted ids whose rows no update of a fused
            optimizer has trained since.
    """

    changes_on_admission = True

    def __init__(
        self, tables: Sequence[IndexedTable], dynamic: Dynamic, device: torch.device
    ) -> None:
        self._tables, self._dynamic, self._device = list(tables), dynamic, device
        self._policy = policy_of(dynamic.eviction)
        shapes = self._shapes = shapes_of(tables, dynamic)
        self._ranges = slot_ranges(shapes)
        self.hash_tables: HashTables = empty_hash_tables(shapes, self._policy, device)
        self.shared = SharedRows.under(dynamic.missing, self._ranges, device)
        if self.shared is not None:
            self.shared.set_ids(self.hash_tables.keys)
        self.clock = AdmissionClock(device)
        self.admission: AdmissionFilter | None = None
        if dynamic.admission is not None:
            self.admission = dynamic.admission.build(tables, device)
        self.deletions = DeletionLog.under(dynamic, len(tables), device)
        self.step_scores = StepScores.under(dynamic, len(tables), device)
        self._expiry = Expiry.under(dynamic, shapes, device)
        self._bounds = RowBounds.under(dynamic, tables, shapes, device)
        self._decay = ScoreDecay.under(dynamic, shapes, device)
        self._row_keys = IdRoundingKeys(tables, device)
        self.demand = GrowthDemand.of(capacities_of(tables, shapes), device)
        self.has_forwards_under_way = False
        self._unfinished: UnfinishedInsertion | None = None

    def capacity(self, table: int) -> int:
        """The most ids that a table can hold here."""
        return self._shapes[table].capacity

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
            self.has_forwards_under_way = True
        before, eviction = self.clock.last.clone(), self._dynamic.eviction
        epoch = self.clock.admitted(admission)
        if self.demand is not None:
            self.demand.begin_batch(state.counters, epoch > before)
        epoch_number = None
        if isinstance(eviction, EpochLFU):
            epoch_number = epoch // eviction.steps_per_epoch
        if self._decay is not None and state.scores is not None:
            # Forwards whose gradients are summed share an epoch.
            happens = epoch > before if is_trained is None else (epoch > before) & is_trained
            self._decay.apply(state.scores, epoch, happens)
        slots, scores = find_slots(state, keys, tables), None
        if self.step_scores is not None and state.scores is not None:
            scores = self.step_scores.of_ids(slots, tables, state.scores)
        touch_slots(
            state,
            slots,
            tables,
            policy=policy,
            epoch=epoch,
            epoch_number=epoch_number,
            scores=scores,
            is_trained=is_trained,
        )
        released, chosen = self.clock.evictable(epoch), None
        erasing = ErasingStep(state, epoch, released, is_trained, self.deletions)
        if self._expiry is not None:
            self._expiry.erase(erasing)
        if self.admission is not None:
            is_new = (tables >= 0) & (slots < 0)
            if is_trained is not None:
                is_new &= is_trained
            chosen = self.admission.admit(int64_keys(keys), tables, is_new, epoch)
        if chosen is not None and chosen.counts is not None and policy is Policy.LFU:
            # An id that was counted before it had a row competes by its whole count.
            policy, scores = Policy.CALLER, chosen.counts
        self._unfinished = UnfinishedInsertion(keys, tables, slots)
        inserted = insert_keys(
            state,
            keys,
            tables,
            slots,
            policy=policy,
            epoch=epoch,
            released=released,
            epoch_number=epoch_number,
            scores=scores,
            wanted=None if chosen is None else chosen.is_wanted,
            is_trained=is_trained,
        )
        if self.deletions is not None:
            self.deletions.append_evicted(inserted, epoch)
        if self.admission is not None:
            self.admission.forget(inserted.keys, inserted.tables, epoch)
        self._row_keys.note(inserted)
        if self._bounds is not None:
            self._bounds.evict(erasing)
        if self.demand is not None:
            self.demand.end_batch(state.counters, epoch, self.clock.last, is_trained)
        return inserted

    def uninitialized_rows(self) -> NewRows | None:
        if self._unfinished is None:
            return None
        new = self._unfinished.new_rows(self.hash_tables)
        self._row_keys.refresh(self.hash_tables.keys)
        if self.deletions is not None:  # the ids that made room may not be in it
            self.deletions.begin_anew()
        return new

    def note_initialized(self) -> None:
        self._unfinished = None

    def note_time(self) -> None:
        """Ask the clock, where rows live for some seconds; between steps. Never waits for a GPU."""
        if self._expiry is not None:
            self._expiry.note_time(self.clock.last)

    @property
    def expires_by_time(self) -> bool:
        """True if :meth:`note_time` must be called before each step that is prepared ahead."""
        return self._expiry is not None and self._expiry.by_time

    @interrupts_deferred()  # An id goes from all tensors, or stays.
    def evict(self, table: int, num_kept: int) -> None:
        """Evict the ids of least score until at most ``num_kept`` are left; rows in use stay."""
        slots, released = self._ranges[table], self.clock.evictable(self.clock.last + 1)
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

    @interrupts_deferred()
    def erase(self, table: int, keys: Tensor, *, in_use: bool = True) -> None:
        """Take ``keys [n]`` and their rows out of a table; rows in use stay, if there may be any
        ``in_use``."""
        tables = torch.full(keys.shape, table, dtype=torch.int32, device=self._device)
        last = self.clock.last
        released = self.clock.evictable(last + 1) if in_use else last
        slots = erase_keys(self.hash_tables, keys, tables, released=released)
        if self.deletions is not None:
            self.deletions.append(slots >= 0, keys, tables, self.clock.last, Counter.ERASED)

    def assign_scores(self, table: int, keys: Tensor, scores: Tensor) -> None:
        """Give ``scores``, int64 ``[n]``, to those of ``keys [n]`` that a table holds."""
        tables = torch.full(keys.shape, table, dtype=torch.int32, device=self._device)
        assign_scores(self.hash_tables, keys, tables, scores)

    def set_row_bytes(self, row_bytes: Sequence[int]) -> None:
        if self._bounds is not None:
            self._bounds.set_row_bytes(row_bytes)

    def release(self, epoch: Tensor, *, keeps_rows: bool = False) -> None:
        self.clock.release(epoch, keeps_rows=keeps_rows)

    def release_prepared(self, *, keeps_rows: bool = False) -> None:
        self.clock.release_prepared(keeps_rows=keeps_rows)

    def release_forwards(self, *, keeps_rows: bool = False) -> None:
        self.has_forwards_under_way = False
        self.clock.release_forwards(keeps_rows=keeps_rows)

    def row_ids(self, table: int) -> Tensor:
        """The ids of a table's rows, int64; 0 for free ones, and for shared rows numbers of their
        own."""
        return self._ranges[table].of(self.hash_tables.keys)

    def rounding_keys(self) -> RoundingKeys:
        """A key for each row, since ids come in any order; kept up to date by admission."""
        self._row_keys.keep(self.hash_tables.keys)
        return self._row_keys.for_updates()

    def rows_with(self, table: int, capacity: int) -> int:
        """The rows of a table with its slots doubled until it has room for ``capacity`` ids, or
        cannot grow."""
        shape, max_rows = self._shapes[table], max_rows_of(self._tables[table])
        while shape.capacity < capacity and shape.num_rows < max_rows:
            shape = shape._replace(num_blocks=2 * shape.num_blocks)
        return shape.num_rows

    def grown(self, num_rows: Sequence[int]) -> GrownIndex:
        """The same ids in tables of ``num_rows``, each what it has, doubled any number of times;
        changes nothing. Waits for the device.

        Raises:
            torch.OutOfMemoryError: where there is no memory for them.
        """
        pairs = zip(self._tables, num_rows, strict=True)
        tables = [table._replace(num_rows=count) for table, count in pairs]
        shapes, device = shapes_of(tables, self._dynamic), self._device
        hash_tables, new_slots = grow(self.hash_tables, self._shapes, shapes)
        expiry = None if self._expiry is None else self._expiry.over(shapes, device)
        decay = ScoreDecay.under(self._dynamic, shapes, device)
        row_keys = self._row_keys.over(tables, hash_tables.keys)
        return GrownIndex(tables, hash_tables, new_slots, expiry, decay, row_keys)

    def take_grown(self, grown: GrownIndex) -> None:
        """Go on with what :meth:`grown` gave."""
        tables, dynamic, device = grown.tables, self._dynamic, self._device
        self._tables, shapes = tables, shapes_of(tables, dynamic)
        self._shapes, self._ranges = shapes, slot_ranges(shapes)
        self.hash_tables, self._row_keys = grown.hash_tables, grown.row_keys
        self._expiry, self._decay = grown.expiry, grown.decay
        self._bounds = RowBounds.under(dynamic, tables, shapes, device)
        self.shared = SharedRows.under(dynamic.missing, self._ranges, device)
        self.demand = GrowthDemand.of(capacities_of(tables, shapes), device)

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
        if source._device.type != "meta":
            self.load_contents(table, source.contents(source_table))

    def contents(self, table: int) -> dict[str, Tensor]:
        """Views, of a table with rows ``R``: ``ids`` int64 ``[R]``; ``digests`` uint8 ``[R]``, 0 of
        free rows; ``touched`` and, where the policy has them, ``scores``, int64 ``[R]``; and
        ``counters`` int64. ``step_score``, int64 ``[2]``, is that of :attr:`step_scores`, and
        ``clock``, int64 ``[1]``, the epoch of the last batch. ``policy``, int64 ``[2]`` and no
        view, says what the scores are of, as :func:`score_numbers`. The counts of
        :attr:`admission` follow."""
        found = {**self._own_contents(table), "clock": self.clock.last}
        numbers = score_numbers(self._dynamic.eviction)
        found["policy"] = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        return found if self.admission is None else {**found, **self.admission.contents(table)}

    def _own_contents(self, table: int) -> dict[str, Tensor]:
        state, rows = self.hash_tables, self._ranges[table]
        found = {
            "ids": rows.of(state.keys),
            "digests": rows.of(state.digests),
            "touched": rows.of(state.touched),
        }
        if state.scores is not None:
            found["scores"] = rows.of(state.scores)
        if self.step_scores is not None:
            found["step_score"] = self.step_scores.of_table(table)
        return {**found, "counters": state.counters[table]}

    def load_contents(self, table: int, contents: Mapping[str, Tensor]) -> None:
        if self.admission is not None:
            self.admission.load_contents(table, contents)
        for name, own in self._own_contents(table).items():
            own.copy_(contents[name])
        self.follow_ids(contents["clock"])

    def follow_ids(self, last: Tensor) -> None:
        """Bring what follows from the ids in line with those that were loaded or placed, and go on
        behind the epoch ``last``, int64 ``[1]``."""
        self._unfinished = None
        if self.deletions is not None:
            self.deletions.begin_anew()
        self.clock.go_on_behind(last)
        if self._expiry is not None:
            self._expiry.forget_times()
        self._row_keys.refresh(self.hash_tables.keys)
