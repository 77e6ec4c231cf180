"""Groups of tables whose rows live on disk, behind host memory and a cache on the device."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchembed.core.row_caches import CacheCounter, RowCache
from torchembed.ops.initialize_rows import initialize_rows
from torchembed.ops.row_cache import (
    RowMoves,
    claim_slots,
    empty_row_cache,
    find_cached,
    read_rows,
)
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.tables.group import ConvertedRows, TableGroup
from torchembed.tables.initial_values import InitializedTable, initial_values
from torchembed.tables.row_index import Admission, NewRows, RowIndex
from torchembed.tables.storage import Disk
from torchembed.tables.table import Table
from torchembed.tables.tiers.held_rows import AnnouncedRows
from torchembed.tables.tiers.host_lines import HostLines
from torchembed.tables.tiers.host_memory import host_tensor
from torchembed.tables.tiers.initial_lines import InitialLines, RowIdentities
from torchembed.tables.tiers.line_copies import ROWS_AT_ONCE, MovedRows, change_lines, copy_lines
from torchembed.tables.tiers.line_layout import LineLayout
from torchembed.tables.tiers.line_moves import (
    LineMover,
    MoveBuffer,
    MovedLines,
    RecordedMoves,
    recorded_moves,
)
from torchembed.tables.tiers.line_store import LineStore
from torchembed.tables.tiers.meta_rows import rows_may_be_meta
from torchembed.tables.tiers.tiered_group import FetchedRows, TieredGroup


class DiskGroup(TieredGroup):
    """A group whose rows are on disk, each as one line with its optimizer state; those that were
    used lately are in host memory, and those of batches under way on the device.

    ``stored_weight`` and ``stored_states`` are on the meta device: all rows are nowhere at once.
    Where host memory holds a row, the device knows, as it does of the cache's slots; each row in a
    slot has a place in host memory, to which it is written back. When a batch is admitted, its rows
    get places, and a thread of the host reads their lines there. Where it has any to read ahead of
    a step, the rows go on to the device at the beginning of that step, as rows do that found no
    slot when they were admitted.

    Attributes:
        host: which rows the places of host memory hold.
        lines: these rows, and those on disk.
    """

    def __init__(
        self, tables: Sequence[Table], stored_weight: Tensor, device: torch.device
    ) -> None:
        """
        Args:
            stored_weight: ``[R, D]`` on the meta device.
            device: of the cache.
        """
        storage = tables[0].spec.storage
        assert isinstance(storage, Disk)
        self._storage = storage
        self._mover, self._buffers = LineMover(), dict[int, list[MoveBuffer]]()
        self._are_new: Tensor | None = None
        """bool ``[R + 1]``, of dynamic tables: rows that were given to ids, and that no batch has
        trained since, so that a line under their number is of another id. The last is no row's."""
        super().__init__(tables, stored_weight, device)

    def _make_cache(self) -> None:
        super()._make_cache()
        device, layout = self.device, LineLayout([self._stored_weight, *self._stored_states])
        # Nothing is brought in before an optimizer trains the tables.
        is_used = self.rule is not None and device.type != "meta"
        num_places = sum(map(self._host_rows_of, self.tables)) if is_used else 1
        num_slots = self.cache.row_of_slot.numel()
        if is_used and num_places < num_slots:
            names = ", ".join(table.spec.name for table in self.tables)
            raise ValueError(
                f"storage of tables {names} must hold at least as many rows in host memory as in "
                f"the cache, got {num_places} and {num_slots} rows of {layout.line_bytes} bytes "
                "with their optimizer state; enlarge host_rows or host_bytes"
            )
        self._last_use = torch.zeros(num_places + 1, dtype=torch.int64, device=device)
        """Of the places; the last element is no place's."""
        empty = empty_row_cache(self.num_rows, num_places, device)
        self.host: RowCache = empty._replace(last_use=self._last_use[:-1])
        self._loading_epoch = torch.zeros(1, dtype=torch.int64, device=device)
        self._buffers.clear()
        if self.index.changes_on_admission and self._are_new is None:
            self._are_new = torch.zeros(self.num_rows + 1, dtype=torch.bool, device=device)
        tensors = [
            host_tensor((num_places, *stored.shape[1:]), stored.dtype, device)
            for stored in (self._stored_weight, *self._stored_states)
        ]
        store = LineStore(self._storage.path, layout)
        if is_used:
            store.take_folder()
        self.lines = HostLines(tensors, store, self._initial_lines())

    def _host_rows_of(self, table: Table) -> int:
        rows, num_bytes = self._storage.host_rows, self._storage.host_bytes
        if rows is None:
            assert num_bytes is not None
            rows = max(num_bytes // self.line_bytes, 1)
        return min(rows, table.num_rows)

    def _initial_lines(self) -> InitialLines:
        values = None
        if self.index.changes_on_admission:
            tables = [
                InitializedTable(t.spec.key, t.spec.initializer, t.spec.num_rows, t.first_column)
                for t in self.tables
            ]
            values = initial_values(tables, torch.device("cpu"))
        return InitialLines(self.tables, self.first_rows, self.initial_state, values)

    def _set_index(self, index: RowIndex) -> None:
        super()._set_index(index)
        if hasattr(self, "lines"):
            self.lines.initial = self._initial_lines()

    @property
    def _stored(self) -> list[Tensor]:
        return self.lines.tensors

    def set_rule(self, rule: UpdateRule, initial_state: float) -> None:
        self.write_back()
        before = self.lines
        self.rule, self.initial_state = rule, initial_state
        shape = rule.state_shape(*self._stored_weight.shape)
        self._stored_states = tuple(
            torch.empty(shape, dtype=torch.float32, device="meta") for _ in range(rule.num_states)
        )
        self._remake_cache()
        copy_lines(before.store, self.lines.store, initial_state, with_states=False)
        self._tell_row_bytes()
        self.step = torch.zeros(1, device=self.device)

    def _remake_cache(self) -> None:
        """Make cache and host memory anew; what is on disk is left where it is, in the store that
        :attr:`lines` had so far."""
        self.lines.tensors.clear()  # or there would be memory for both at once
        self._make_cache()

    def converted(self, convert: Callable[[Tensor], Tensor]) -> ConvertedRows:
        self.write_back()
        like = convert(self.weight[:0])
        return ConvertedRows(self._stored_weight.to(like.dtype), like.device)

    def convert(self, rows: ConvertedRows) -> None:
        was_meta, before = self.device.type == "meta", self.lines
        (weight, device), are_new = rows, self._are_new
        self._stored_weight = weight
        self.weight = weight.new_empty(1, weight.shape[1], device=device)
        for table in self.tables:
            table.cache_device = device
        self._are_new = None if are_new is None or was_meta else are_new.to(device)
        self._remake_cache()
        self._take_store(before.store)
        if was_meta and self.rule is not None:
            self.set_rule(self.rule, self.initial_state)
        self.step = torch.zeros(1, device=device) if was_meta else self.step.to(device)
        self.pending.to(device)
        self._set_index(self.index.to(device))
        self.point_parameters()

    def take_stored_rows(self, groups: Iterable[TableGroup]) -> None:
        for group in dict.fromkeys(groups):
            if not isinstance(group, DiskGroup) or group is self:
                continue
            moved = [
                MovedRows(group.first_row_of(table), self.first_row_of(table), table.num_rows)
                for table in self.tables
                if table in group.tables
            ]
            if self._are_new is not None and group._are_new is not None:
                for first, here, count in moved:
                    self._are_new[here : here + count] = group._are_new[first : first + count]
            own, given = self.lines.store, group.lines.store
            if own.layout.equals(given.layout) and group.tables == self.tables:
                self.lines.store, group.lines.store = given, own
            else:
                same = group.rule == self.rule
                copy_lines(given, own, self.initial_state, with_states=same, moved=moved)

    def _take_store(self, store: LineStore) -> None:
        """Take over all lines of a database, which holds the same rows."""
        if store.layout.equals(self.lines.store.layout):
            self.lines.store = store
        elif self.device.type != "meta":
            copy_lines(store, self.lines.store, self.initial_state)

    def _bring_in(self, fetched: FetchedRows, admission: Admission) -> FetchedRows:
        moves, num_short = self._claim_places(fetched, admission.is_trained)
        has_places = num_short == 0
        if admission.is_trained is not None:
            has_places = has_places & admission.is_trained
        if admission.epoch is None:
            self.wait_for_lines()
            is_loading = torch.zeros_like(has_places)
        else:
            # A batch may come in several parts.
            epoch = torch.where(moves.count > 0, fetched.epoch, self._loading_epoch)
            self._loading_epoch.copy_(epoch)
            is_loading = has_places & (epoch == fetched.epoch)
            self._count_loading(fetched, is_loading)
        num_refused = self._claim(fetched, has_places & ~is_loading, self._counters_of(admission))
        return fetched._replace(
            num_refused=num_refused + is_loading, num_short=num_short, may_be_late=has_places
        )

    def _claim_places(
        self, fetched: FetchedRows, is_trained: Tensor | None
    ) -> tuple[RowMoves, Tensor]:
        """Give the rows of a batch places in host memory, and have their lines read there; the
        moves, and how many places are too few."""
        # Rows in slots are written back to their places, which are in use for as long.
        places = find_cached(self.host.slot_of_row, self.cache.row_of_slot)
        places = torch.where(places < 0, self._last_use.numel() - 1, places)
        last_use = self._last_use[places]
        self._last_use[places] = (fetched.epoch + 1).expand_as(places)
        claim = claim_slots(
            self.host,
            fetched.unique_rows,
            fetched.num_rows,
            epoch=fetched.epoch,
            released=self.clock.released,
            is_trained=is_trained,
        )
        now = self._last_use[places]
        self._last_use[places] = torch.where(now > fetched.epoch, last_use, now)
        identities = self._identities_of(claim.moves.read_rows)
        if self._are_new is not None:
            is_claimed = claim.num_refused == 0
            if is_trained is not None:
                is_claimed = is_claimed & is_trained
            self._note_new(torch.where(is_claimed, fetched.unique_rows, -1), are_new=False)
        self._submit(claim.moves, identities)
        return claim.moves, claim.num_refused

    def _identities_of(self, rows: Tensor) -> RowIdentities | None:
        """What the initial values of ``rows [n]``, -1 for none, are functions of; None in static
        tables. Never waits for a GPU."""
        if self._are_new is None:
            return None
        ids = torch.zeros_like(rows)
        for number, first in enumerate(self.first_rows[:-1]):
            of_table = self.index.row_ids(number)
            assert isinstance(of_table, Tensor)
            place = rows - first
            is_here = (place >= 0) & (place < len(of_table))
            ids = torch.where(is_here, of_table[place.clamp(0, len(of_table) - 1)], ids)
        return RowIdentities(ids, self._are_new[rows])

    def _note_new(self, rows: Tensor, *, are_new: bool) -> None:
        """Note of ``rows [n]``, -1 for none, whether they are new. Never waits for a GPU."""
        assert self._are_new is not None
        # By index_fill_: a captured step copies no number of the host.
        self._are_new.index_fill_(0, torch.where(rows < 0, self.num_rows, rows).long(), are_new)

    def _submit(self, moves: RowMoves, identities: RowIdentities | None) -> None:
        """Have lines moved as ``moves`` of places say; where a call is captured, by each replay."""
        num_moves, device = moves.slots.numel(), self.device
        free = self._buffers.setdefault(num_moves, [])
        if free:
            buffer = free.pop()
        else:
            has_identities = identities is not None
            buffer = self._mover.made(lambda: MoveBuffer(num_moves, has_identities, device))
        buffer.copy_from(moves, identities)
        lines, recorded = self.lines, recorded_moves()
        if recorded is not None:
            recorded.append(RecordedMoves(self._mover, buffer, lines.move))
            return

        def move(moved: MovedLines) -> None:
            lines.move(moved)
            free.append(buffer)

        self._mover.submit(buffer, move)

    def _count_loading(self, fetched: FetchedRows, is_loading: Tensor) -> None:
        """Count a batch that is prepared ahead, and whose rows go on to the device in its step,
        which counts what it moves alone."""
        slots = self.placed_rows(fetched.unique_rows)
        num_missing = ((slots < 0) & (fetched.unique_rows >= 0)).sum(0, keepdim=True)
        for counter, number in (
            (CacheCounter.UNIQUE_ROWS, fetched.num_rows),
            (CacheCounter.UNIQUE_MISSES, num_missing),
        ):
            self.cache.counters[counter : counter + 1] += number * is_loading

    def wait_for_lines(self) -> None:
        """Wait until host memory holds all rows that were admitted.

        Raises:
            RuntimeError: where a step is captured, which cannot wait.
            Exception: what reading or writing the disk failed with, here and from then on.
        """
        if recorded_moves() is not None:
            names = ", ".join(table.spec.name for table in self.tables)
            raise RuntimeError(
                f"rows of tables {names} on disk cannot be looked up by a captured step that has "
                "not admitted them ahead, since it waits for no disk; train their ids as the batch "
                "has them"
            )
        self._mover.wait()

    def stop_thread(self) -> None:
        """End the threads that move lines and read them ahead, which begin anew where they are
        needed."""
        self._mover.stop()
        self.lines.store.stop_reading_ahead()

    def read_ahead(self, rows: Tensor, buffer_bytes: int) -> AnnouncedRows:
        """Have the lines of rows read ahead that are not in host memory, or leave it, for a batch
        to come. Any thread may call it; it waits while lines are written.

        Args:
            rows: int64 ``[n]`` on the CPU.
            buffer_bytes: as of :meth:`LineStore.announce`.

        Returns:
            What was announced, to be retired.

        Raises:
            Exception: what reading ahead failed with before.
        """
        held, store = self.lines.held, self.lines.store
        number, absent = held.announce(rows.numpy(), self.num_rows)
        return AnnouncedRows(held, number, store.announce(absent, buffer_bytes))

    @torch.no_grad()
    def fetch_refused(self, fetched: FetchedRows) -> Tensor:
        recorded = recorded_moves()
        if recorded is None:
            self._mover.wait()
        else:
            recorded.append(RecordedMoves(self._mover))
        return super().fetch_refused(fetched)

    def _move(self, moves: RowMoves) -> None:
        held = self.host.slot_of_row
        written, read = (find_cached(held, rows) for rows in (moves.written_rows, moves.read_rows))
        super()._move(moves._replace(written_rows=written, read_rows=read))

    def _check_unchanged(self) -> None:
        """Raise ``RuntimeError`` where a parameter was changed in place: it holds no rows."""
        versions = self._versions()
        if self._versions_known not in ([], versions):
            names = ", ".join(table.spec.name for table in self.tables)
            raise RuntimeError(
                f"weight of one of the tables {names} on disk was changed in place, and holds no "
                "rows; write rows by torchembed.tables.write_rows, or load a checkpoint"
            )
        self._versions_known = versions

    @torch.no_grad()
    def initialize(self, new: NewRows) -> None:
        slots = find_cached(self.cache.slot_of_row, new.rows)
        TableGroup.initialize(self, new._replace(rows=slots))
        places = find_cached(self.host.slot_of_row, new.rows)
        initialize_rows(
            self._stored[0],
            self._stored[1:],
            torch.where(slots < 0, places, -1),
            new.ids,
            new.tables,
            self.initial_values,
            initial_state=self.initial_state,
        )
        # The others get their values where they are read.
        self._note_new(new.rows, are_new=True)

    def write_back(self) -> None:
        """Bring what is on disk up to date, with all rows that were trained; they stay where they
        are. Waits for a GPU, and for the disk.

        Raises:
            Exception: as :meth:`wait_for_lines`.
        """
        if self.weight.is_meta:
            return
        self.wait_for_lines()
        super().write_back()
        places = self.host.is_dirty.nonzero().flatten()
        if len(places):
            self.lines.save(places.cpu(), self.host.row_of_slot[places].cpu())
            self.host.counters[CacheCounter.WRITTEN_ROWS] += len(places)
            # Those of batches that were prepared ahead are still to be trained.
            self.host.is_dirty.copy_(self.host.last_use > self.clock.released)

    def forget_cached(self) -> None:
        """Empty the cache and host memory without writing rows anywhere, after what is on disk was
        changed; rows of batches under way are read anew. Waits for a GPU, and for the disk.

        Raises:
            Exception: as :meth:`wait_for_lines`.
        """
        super().forget_cached()
        if self.weight.is_meta:
            return
        self.wait_for_lines()
        host, is_used = self.host, self.host.last_use > self.clock.released
        left = (~is_used).nonzero().flatten()
        rows = host.row_of_slot[left]
        host.slot_of_row[rows[rows >= 0]] = -1
        for state, nothing in (
            (host.row_of_slot, -1),
            (host.last_use, 0),
            (host.is_recent, False),
            (host.is_dirty, False),
        ):
            state[left] = nothing
        places = is_used.nonzero().flatten()
        rows = host.row_of_slot[places]
        identities = self._identities_on_host(rows)
        self.lines.held.forget()
        self.lines.load(places.cpu(), rows.cpu(), identities)

    def read_lines(self, rows: Tensor, *, with_states: bool = True) -> list[Tensor]:
        """The weight ``[n, D]`` and the states of ``rows``, int64 ``[n]`` on the CPU, as they are
        on disk: call :meth:`write_back` before. Copies.

        Raises:
            Exception: as :meth:`wait_for_lines`.
        """
        self.wait_for_lines()
        identities = self._identities_on_host(rows.to(self.device))
        return self.lines.read(rows, identities, None if with_states else 1)

    def read_weight(self, rows: Tensor) -> Tensor:
        self.write_back()
        return self.read_lines(rows.cpu(), with_states=False)[0]

    @torch.no_grad()
    def write_lines(self, rows: Tensor, values: Sequence[Tensor | None]) -> None:
        """Write rows on disk, after :meth:`write_back`, and forget what the cache and host memory
        hold.

        Args:
            rows: int64 ``[n]``, on the CPU, each once.
            values: the weight ``[n, D]`` and each state, converted to the dtypes here; None for
                what stays as it is.

        Raises:
            Exception: as :meth:`wait_for_lines`.
        """
        found = self.read_lines(rows)
        for tensor, given in zip(found, values, strict=True):
            if given is not None:
                tensor.copy_(given)
        self.lines.store.write(rows, self.lines.store.layout.packed(found))
        if self._are_new is not None:
            self._note_new(rows.to(self.device), are_new=False)
        self.forget_cached()

    def fill_initial_rows(self, table: Table) -> None:
        self._change_lines(table, self._fill_weight)

    def reset_states(self, table: Table) -> None:
        self._change_lines(table, self._fill_states)

    def _fill_weight(self, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        self.lines.initial.fill(tensors[:1], rows, self._identities_on_host(rows.to(self.device)))

    def _fill_states(self, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        for state in tensors[1:]:
            state.fill_(self.initial_state)

    @torch.no_grad()
    def _change_lines(
        self, table: Table, change: Callable[[Tensor, Sequence[Tensor]], None]
    ) -> None:
        """:func:`change_lines` of all rows of ``table``."""
        self.write_back()
        first = self.first_row_of(table)
        change_lines(self.lines.store, range(first, first + table.num_rows), change)
        self.forget_cached()

    @property
    def is_trained(self) -> bool:
        """True if rows may have other values than at first. Waits as :meth:`write_back`."""
        self.write_back()
        return not self.lines.store.is_empty

    def check_whole(self, what: str) -> None:
        if rows_may_be_meta():
            return
        names = ", ".join(table.spec.name for table in self.tables)
        raise TypeError(
            f"tables {names} are on disk, and {what} would hold all their rows at once; save and "
            "load them by torchembed.training.CheckpointFolder, or read and write some rows at "
            "a time by row_chunks and write_rows of torchembed.tables"
        )

    @torch.no_grad()
    def saved_lines(self) -> Path | None:
        """A new folder with a checkpoint of all rows that are not as they were at first, as they
        are now, by their numbers; the caller's to move or remove. None where there are none. Waits
        for a GPU, and for the disk.

        Raises:
            Exception: as :meth:`wait_for_lines`.
            OSError, RowStoreError: where files cannot be written.
        """
        self.write_back()
        if self._are_new is not None:
            # Under their numbers are lines of the ids that had them before, or none.
            rows = self._are_new[:-1].nonzero().flatten().cpu()
            for some in rows.split(ROWS_AT_ONCE):
                found = self.read_lines(some)
                self.lines.store.write(some, self.lines.store.layout.packed(found))
            self._are_new.zero_()
        return self.lines.store.saved()

    def replace_lines(self, checkpoint: Path | None) -> None:
        """Take all rows of what :meth:`saved_lines` made for a group of the same tables in place of
        these; None: all rows are as they were at first. The checkpoint stays as it is.

        Raises:
            Exception: as :meth:`wait_for_lines`.
            OSError, ValueError, RowStoreError: as ``RocksDBStore.restore``; nothing is changed.
        """
        self.wait_for_lines()
        self.lines.store.replace(checkpoint)
        if self._are_new is not None:
            self._are_new.zero_()
        self.forget_cached()

    def _identities_on_host(self, rows: Tensor) -> RowIdentities | None:
        """:meth:`_identities_of`, on the host, for which it waits."""
        found = self._identities_of(rows)
        return None if found is None else RowIdentities(*(one.cpu() for one in found))

    def gathered_rows(self, rows: Tensor) -> Tensor:
        """``[L, D]``: a copy of each of ``rows``, wherever it is; zeros for row -1. Changes
        nothing. Waits for a GPU, and for the disk where rows are nowhere else.

        Raises:
            Exception: as :meth:`wait_for_lines`.
        """
        if self.weight.is_meta:
            return super().gathered_rows(rows)
        self.wait_for_lines()
        slots, places = self.placed_rows(rows), find_cached(self.host.slot_of_row, rows)
        found = read_rows(self.weight[:-1], self._stored[0], slots, places)
        is_on_disk = ((slots < 0) & (places < 0) & (rows >= 0)).nonzero().flatten()
        if len(is_on_disk):
            distinct, inverse = rows[is_on_disk].long().unique(return_inverse=True)
            identities = self._identities_on_host(distinct)
            (read,) = self.lines.read(distinct.cpu(), identities, 1)
            found[is_on_disk] = read.to(found.device)[inverse]
        return found
