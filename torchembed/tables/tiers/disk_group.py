"""Groups of tables whose rows live on disk, behind host memory and a cache on the device."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchembed.core.row_caches import CacheCounter
from torchembed.ops.row_cache import RowMoves, move_rows, read_rows
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.tables.group import ConvertedRows, TableGroup
from torchembed.tables.row_index import Admission, NewRows, RowIndex
from torchembed.tables.storage import Disk, rows_held
from torchembed.tables.table import Table
from torchembed.tables.tiers.fetched_rows import FetchedRows
from torchembed.tables.tiers.host_lines import HostLines
from torchembed.tables.tiers.host_memory import host_tensor
from torchembed.tables.tiers.host_places import HostPlaces
from torchembed.tables.tiers.initial_lines import InitialLines, initial_lines
from torchembed.tables.tiers.line_copies import MovedRows
from torchembed.tables.tiers.line_layout import LineLayout
from torchembed.tables.tiers.line_moves import LineMover, RecordedMoves, recorded_moves
from torchembed.tables.tiers.line_store import LineStore
from torchembed.tables.tiers.meta_rows import rows_may_be_meta
from torchembed.tables.tiers.row_owners import RowOwners
from torchembed.tables.tiers.stored_rows import StoredRows
from torchembed.tables.tiers.tiered_group import TieredGroup


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
        self._mover = LineMover()
        super().__init__(tables, stored_weight, device)

    def _make_cache(self) -> None:
        super()._make_cache()
        device, layout = self.device, LineLayout([self._stored_weight, *self._stored_states])
        # Nothing is brought in before an optimizer trains the tables.
        is_used = self.rule is not None and device.type != "meta"
        num_places = self._num_places() if is_used else 1
        tensors = [
            host_tensor((num_places, *stored.shape[1:]), stored.dtype, device)
            for stored in (self._stored_weight, *self._stored_states)
        ]
        store = LineStore(self._storage.path, layout)
        if is_used:
            store.take_folder()
        self.lines = HostLines(tensors, store, self._initial_lines())
        self._places = HostPlaces(
            self.num_rows, num_places, self.lines, self._owners, self._mover, device
        )
        self.host = self._places.cache
        self._rows_on_disk = StoredRows(self.lines, self._owners)

    def _num_places(self) -> int:
        """Rows that host memory holds.

        Raises:
            ValueError: if they are no more than those of the cache, and not all rows: nothing
                could come once the cache is full.
        """
        num_places = sum(map(self._host_rows_of, self.tables))
        num_slots = sum(map(self._cache_rows_of, self.tables))
        if num_places < min(num_slots + 1, self.num_rows):
            names = ", ".join(table.spec.name for table in self.tables)
            raise ValueError(
                f"storage of tables {names} must hold more rows in host memory than in the cache, "
                f"by those of a batch, got {num_places} and {num_slots} rows of {self.line_bytes} "
                "bytes with their optimizer state; enlarge host_rows or host_bytes"
            )
        return num_places

    def _host_rows_of(self, table: Table) -> int:
        sizes = self._storage.host_rows, self._storage.host_bytes
        return rows_held(*sizes, num_rows=table.num_rows, line_bytes=self.line_bytes)

    def _initial_lines(self) -> InitialLines:
        return initial_lines(
            self.tables,
            self.first_rows,
            self.initial_state,
            are_dynamic=self.index.changes_on_admission,
        )

    def _set_index(self, index: RowIndex) -> None:
        super()._set_index(index)
        if not hasattr(self, "_owners"):  # the first one, before there is a cache
            self._owners = RowOwners(index, self.first_rows, self.device)
            return
        self._owners.index = index
        self.lines.initial = self._initial_lines()

    @property
    def _stored(self) -> list[Tensor]:
        return self.lines.tensors

    def set_rule(self, rule: UpdateRule, initial_state: float) -> None:
        self.write_back()
        before, kept = self._rows_on_disk, (self.rule, self.initial_state, self._stored_states)
        self.rule, self.initial_state = rule, initial_state
        shape = rule.state_shape(*self._stored_weight.shape)
        self._stored_states = tuple(
            torch.empty(shape, dtype=torch.float32, device="meta") for _ in range(rule.num_states)
        )
        try:
            self._num_places()
        except ValueError:
            self.rule, self.initial_state, self._stored_states = kept
            raise
        self._remake_cache()
        self._rows_on_disk.take_all(before, with_states=False)
        self._tell_row_bytes()
        self.step = torch.zeros(1, device=self.device)

    def _remake_cache(self) -> None:
        """Make cache and host memory anew; what is on disk is left where it is, in the
        ``_rows_on_disk`` that there were so far."""
        self.lines.tensors.clear()  # or there would be memory for both at once
        self._make_cache()

    def converted(self, convert: Callable[[Tensor], Tensor]) -> ConvertedRows:
        self.write_back()
        like = convert(self.weight[:0])
        return ConvertedRows(self._stored_weight.to(like.dtype), like.device)

    def convert(self, rows: ConvertedRows) -> None:
        was_meta, before = self.device.type == "meta", self._rows_on_disk
        weight, device = rows
        self._stored_weight = weight
        self.weight = weight.new_empty(1, weight.shape[1], device=device)
        for table in self.tables:
            table.cache_device = device
        self._owners.to(device)
        self._remake_cache()
        self._rows_on_disk.take_all(before, converts=device.type != "meta")
        self._settle_on(device, was_meta=was_meta)

    def take_stored_rows(self, groups: Iterable[TableGroup]) -> None:
        for group in dict.fromkeys(groups):
            if not isinstance(group, DiskGroup) or group is self:
                continue
            moved = [
                MovedRows(group.first_row_of(table), self.first_row_of(table), table.num_rows)
                for table in self.tables
                if table in group.tables
            ]
            self._rows_on_disk.take_tables(
                group._rows_on_disk,
                moved,
                are_all=group.tables == self.tables,
                with_states=group.rule == self.rule,
            )

    def _bring_in(self, fetched: FetchedRows, admission: Admission) -> FetchedRows:
        claim = self._places.claim(
            fetched,
            self.cache.row_of_slot,
            released=self.clock.released,
            is_trained=admission.is_trained,
        )
        has_places = claim.num_short == 0
        if admission.is_trained is not None:
            has_places = has_places & admission.is_trained
        if admission.epoch is None:
            self.wait_for_lines()
            is_loading = torch.zeros_like(has_places)
        else:
            is_loading = has_places & self._places.is_loading(fetched.epoch, claim)
            self._count_loading(fetched, is_loading)
        num_refused = self._claim(fetched, has_places & ~is_loading, self._counters_of(admission))
        return fetched._replace(
            num_refused=num_refused + is_loading, num_short=claim.num_short, may_be_late=has_places
        )

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
            RuntimeError: if a step is captured, which cannot wait.
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

    @torch.no_grad()
    def fetch_refused(self, fetched: FetchedRows) -> Tensor:
        recorded = recorded_moves()
        if recorded is None:
            self._mover.wait()
        else:
            recorded.append(RecordedMoves(self._mover))
        if fetched.num_short is not None and fetched.may_be_late is not None:
            # Another pipeline over the tables may have made room of the batch's rows.
            places = self._places.find(fetched.unique_rows)
            num_lost = ((places < 0) & (fetched.unique_rows >= 0)).sum(0, keepdim=True)
            fetched.num_short.add_(num_lost * fetched.may_be_late)
            fetched.may_be_late.logical_and_(num_lost == 0)
        return super().fetch_refused(fetched)

    def _exchange(self, moves: RowMoves) -> None:
        written, read = map(self._places.find, (moves.written_rows, moves.read_rows))
        moves = moves._replace(written_rows=written, read_rows=read)
        move_rows(moves, self._cached, self._stored)

    def _stored_places(self, rows: Tensor) -> Tensor:
        return self._places.find(rows)

    def _check_unchanged(self) -> None:
        """Raise ``RuntimeError`` where a parameter was changed in place: it holds no rows."""
        versions = self._versions()
        if self._versions_known not in ([], versions):
            names = ", ".join(table.spec.name for table in self.tables)
            raise RuntimeError(
                f"weight of one of the tables {names} on disk was changed in place, and holds no "
                "rows; write rows by torchembed.checkpoints.load_rows, or load a checkpoint"
            )
        self._versions_known = versions

    @torch.no_grad()
    def initialize(self, new: NewRows) -> None:
        super().initialize(new)
        # The others get their values where they are read.
        self._owners.note(new.rows, are_new=True)

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
        self._places.save_trained(self.clock.released)

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
        self._places.forget(self.clock.released)

    def read_lines(self, rows: Tensor, *, with_states: bool = True) -> list[Tensor]:
        """The weight ``[n, D]`` and the states of ``rows``, int64 ``[n]`` on the CPU, as they are
        on disk: call :meth:`write_back` before. Copies.

        Raises:
            Exception: as :meth:`wait_for_lines`.
        """
        self.wait_for_lines()
        return self._rows_on_disk.read(rows, with_states=with_states)

    def read_weight(self, rows: Tensor) -> Tensor:
        self.write_back()
        return self.read_lines(rows.cpu(), with_states=False)[0]

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
        self.wait_for_lines()
        self._rows_on_disk.write(rows, values)
        self.forget_cached()

    def fill_initial_rows(self, table: Table) -> None:
        self.write_back()
        self._rows_on_disk.reset_weights(self._rows_of(table))
        self.forget_cached()

    def reset_states(self, table: Table) -> None:
        self.write_back()
        self._rows_on_disk.reset_states(self._rows_of(table))
        self.forget_cached()

    def _rows_of(self, table: Table) -> range:
        first = self.first_row_of(table)
        return range(first, first + table.num_rows)

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
            "a time by model_rows and load_rows of torchembed.checkpoints"
        )

    def saved_lines(self) -> Path | None:
        """A new folder with a checkpoint of all rows that are not as they were at first, as they
        are now, by their numbers; the caller's to move or remove. None where there are none. Waits
        for a GPU, and for the disk.

        Raises:
            Exception: as :meth:`wait_for_lines`.
            OSError, RowStoreError: if files cannot be written.
        """
        self.write_back()
        return self._rows_on_disk.saved()

    def replace_lines(self, checkpoint: Path | None) -> None:
        """Take all rows of what :meth:`saved_lines` made for a group of the same tables in place of
        these; None: all rows are as they were at first. The checkpoint stays as it is.

        Raises:
            Exception: as :meth:`wait_for_lines`.
            OSError, ValueError, RowStoreError: as ``RocksDBStore.restore``; nothing is changed.
        """
        self.wait_for_lines()
        self._rows_on_disk.replace(checkpoint)
        self.forget_cached()

    def gathered_rows(self, rows: Tensor) -> Tensor:
        """``[L, D]``: a copy of each of ``rows``, wherever it is; zeros for row -1. Changes
        nothing. Waits for a GPU, and for the disk where rows are nowhere else.

        Raises:
            Exception: as :meth:`wait_for_lines`.
        """
        if self.weight.is_meta:
            return super().gathered_rows(rows)
        self.wait_for_lines()
        slots, places = self.placed_rows(rows), self._places.find(rows)
        found = read_rows(self.weight[:-1], self._stored[0], slots, places)
        is_on_disk = ((slots < 0) & (places < 0) & (rows >= 0)).nonzero().flatten()
        if len(is_on_disk):
            distinct, inverse = rows[is_on_disk].long().unique(return_inverse=True)
            (read,) = self._rows_on_disk.read(distinct, with_states=False)
            found[is_on_disk] = read.to(found.device)[inverse]
        return found
