"""Groups of tables whose rows live outside the device, behind a cache on it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchembed.core.checks import FLOAT_DTYPES
from torchembed.core.features import SparseFeatures
from torchembed.core.row_caches import RowCache
from torchembed.ops.initialize_rows import initialize_rows
from torchembed.ops.row_cache import (
    RowMoves,
    claim_slots,
    dirty_moves,
    empty_row_cache,
    find_cached,
    forget_rows,
    move_rows,
    read_rows,
)
from torchembed.ops.rowwise_update import RoundingKeys
from torchembed.ops.segments import Runs
from torchembed.tables.admission_clock import AdmissionClock
from torchembed.tables.deferred_interrupts import interrupts_deferred
from torchembed.tables.group import TableGroup
from torchembed.tables.row_index import Admission, NewRows, SlotIndex
from torchembed.tables.storage import rows_held
from torchembed.tables.table import Table
from torchembed.tables.tiers.fetched_rows import FetchedRows
from torchembed.tables.tiers.slot_keys import SlotKeys
from torchembed.tables.tiers.step_counters import new_step_counters


class TieredGroup(TableGroup):
    """A group whose rows are outside the device. ``weight`` and ``states`` hold those that batches
    under way use, ``[C + 1, ...]``; the last of these is no row's: updates of rows that found no
    place go there.

    Rows have the numbers that they have in a group on the device: ids are routed to them, gradients
    recorded for them. Where ``weight`` holds a row is asked when it is looked up and when it is
    updated. A batch's rows are brought into the cache when it is admitted, and stay there until it
    is released; those that make room are written back.

    Derived classes say where rows are, and how they get to the cache and back; they also override
    :meth:`set_rule`, :meth:`converted` and :meth:`convert`.

    Attributes:
        cache: which rows the slots of ``weight`` hold. Its counters are of rows that were written
            back, and of batches that were prepared ahead of their step.
        counters: of what the step itself brought in.
        clock: the epochs of the batches whose rows were brought in.
    """

    def __init__(
        self, tables: Sequence[Table], stored_weight: Tensor, device: torch.device
    ) -> None:
        """
        Args:
            stored_weight: ``[R, D]``, outside the device.
            device: of the cache.
        """
        self._stored_weight = stored_weight
        self._stored_states: tuple[Tensor, ...] = ()
        self._slot_keys: SlotKeys | None = None
        for table in tables:
            table.cache_device = device
        num_columns = stored_weight.shape[1]
        super().__init__(tables, stored_weight.new_empty(1, num_columns, device=device))
        self._versions_known: list[int] = []
        self._make_cache()

    def _make_cache(self) -> None:
        """Make the cache, without rows, of the size that the tables ask for."""
        device, weight = self.weight.device, self._stored_weight
        num_slots = sum(map(self._cache_rows_of, self.tables))
        self.cache: RowCache = empty_row_cache(self.num_rows, num_slots, device)
        self.counters = new_step_counters(device)
        self.clock = AdmissionClock(device)
        self._slot_keys = None
        self._num_emptied = torch.zeros(1, dtype=torch.int64, device=device)
        self.weight = weight.new_zeros(num_slots + 1, weight.shape[1], device=device)
        self.states = tuple(
            state.new_zeros(num_slots + 1, *state.shape[1:], device=device)
            for state in self._stored_states
        )

    def _cache_rows_of(self, table: Table) -> int:
        storage = table.spec.storage
        assert storage is not None
        sizes = storage.cache_rows, storage.cache_bytes
        return rows_held(*sizes, num_rows=table.num_rows, line_bytes=self.line_bytes)

    @property
    def line_bytes(self) -> int:
        """Bytes of a row with its optimizer state."""
        parts = (self._stored_weight, *self._stored_states)
        return sum(part.element_size() * part.shape[1:].numel() for part in parts)

    @property
    def stored_weight(self) -> Tensor:
        return self._stored_weight

    @property
    def stored_states(self) -> tuple[Tensor, ...]:
        return self._stored_states

    @property
    def _stored(self) -> list[Tensor]:
        """The memory of the host in which rows and their states are, ``[P, ...]`` each."""
        raise NotImplementedError

    def _stored_places(self, rows: Tensor) -> Tensor:
        """The places of ``rows`` in :attr:`_stored`, -1 for row -1."""
        raise NotImplementedError

    @property
    def _cached(self) -> list[Tensor]:
        """The slots of the cache, ``[C, ...]`` each."""
        return [tensor[:-1] for tensor in (self.weight, *self.states)]

    @property
    def changes_on_admission(self) -> bool:
        return True

    @property
    def rounding_keys(self) -> RoundingKeys:
        of_rows = super().rounding_keys
        if self._slot_keys is None:
            self._slot_keys = SlotKeys(self.weight.shape[0], self.device)
            rows = self.cache.row_of_slot
            slots = torch.arange(rows.numel(), device=rows.device).masked_fill(rows < 0, -1)
            self._slot_keys.note(slots, rows, of_rows)
        return self._slot_keys.for_updates(of_rows)

    def check_convertible(self, convert: Callable[[Tensor], Tensor]) -> None:
        """Raise ``TypeError`` where ``convert`` gives the rows a dtype that caches do not hold."""
        dtype = convert(self.weight[:0]).dtype
        if dtype not in FLOAT_DTYPES:
            names = ", ".join(table.spec.name for table in self.tables)
            raise TypeError(
                f"tables {names} in host memory must be float32, float16 or bfloat16, got {dtype} "
                "to convert them to; leave them out, or keep them on the device"
            )

    @torch.no_grad()
    def admit(
        self,
        slots: SlotIndex,
        features: SparseFeatures,
        rows: Tensor | None,
        is_valid: Tensor | None = None,
        admission: Admission | None = None,
    ) -> Tensor:
        if self.index.changes_on_admission:
            return super().admit(slots, features, rows, is_valid, admission)
        assert rows is not None
        self.num_forward_admissions += admission is None or admission.epoch is None
        return rows

    @torch.no_grad()
    def initialize(self, new: NewRows) -> None:
        slots = find_cached(self.cache.slot_of_row, new.rows)
        super().initialize(new._replace(rows=slots))
        # Where rows are stored, too: what was not trained since is not written there, and the rows
        # of a batch that is prepared ahead may be saved before they are trained.
        initialize_rows(
            self._stored[0],
            self._stored[1:],
            self._stored_places(new.rows),
            new.ids,
            new.tables,
            self.initial_values,
            initial_state=self.initial_state,
            num_new=new.num_new,
        )

    @torch.no_grad()
    def fetch(self, runs: Runs, admission: Admission | None = None) -> FetchedRows | None:
        """Bring the rows of a batch into the cache, where they stay until it is released.

        Where they are more than the slots that the cache can free, nothing moves; ``num_refused``
        of the result says how many slots are too few.

        Args:
            runs: of the batch's rows.
            admission: of the batch; None for one that is trained and was not prepared ahead.

        Returns:
            None where no optimizer of torchembed's trains the tables, or the module is in
            evaluation mode, so that nothing was brought in.

        Raises:
            RuntimeError: if a weight was changed in place while the cache may hold other values.
        """
        admission = admission or Admission()
        is_trained = self.rule is not None and self.tables[0].parameter.requires_grad
        if not (is_trained and admission.inserts):
            return None
        epoch = self.clock.admitted(admission).clone()
        refused, emptied = torch.zeros_like(epoch), self._num_emptied.clone()
        fetched = FetchedRows(runs.unique_rows, runs.num_runs, refused, epoch, emptied)
        # Positions of row -1 are the first.
        requested = runs.order.numel() - runs.starts[:1]
        if admission.is_trained is not None:
            requested = requested * admission.is_trained
        self.counters.requested.add_(requested)
        return self._bring_in(fetched, admission)

    def _bring_in(self, fetched: FetchedRows, admission: Admission) -> FetchedRows:
        """Bring the rows of a batch in that is admitted."""
        counters = self._counters_of(admission)
        num_refused = self._claim(fetched, admission.is_trained, counters)
        return fetched._replace(num_refused=num_refused, may_be_late=admission.is_trained)

    def _counters_of(self, admission: Admission) -> Tensor:
        """The counters of a batch, which is prepared ahead or not."""
        return self.counters.of_forwards if admission.epoch is None else self.cache.counters

    @torch.no_grad()
    def fetch_refused(self, fetched: FetchedRows) -> Tensor:
        """Bring the rows of a batch in that were refused when it was admitted, or that the cache
        lost since; nothing changes where none were. The batches before it are trained by now, and
        released.

        Returns:
            int64 ``[1]``: slots that the cache has too few for the batch alone; 0 where all rows
            are there.
        """
        is_late = (fetched.num_refused > 0) | (fetched.num_emptied != self._num_emptied)
        # Another pipeline over the tables may have made room of the batch's rows.
        slots = find_cached(self.cache.slot_of_row, fetched.unique_rows, num_rows=fetched.num_rows)
        is_late |= (slots >= 0).sum(0, keepdim=True) < fetched.num_rows
        if fetched.may_be_late is not None:
            is_late = is_late & fetched.may_be_late
        # Or have let go of them, so that the next batch could take their places.
        is_late |= self.clock.renew(fetched.epoch, fetched.may_be_late)
        self.counters.late_batches.add_(is_late)
        num_refused = self._claim(fetched, is_late, self.counters.late)
        # Who looks the batch up once more, to compare, finds its rows there.
        fetched.num_refused.copy_(num_refused)
        fetched.num_emptied.copy_(self._num_emptied)
        return num_refused

    @interrupts_deferred()  # What is said to be in a slot must be there.
    def _claim(self, fetched: FetchedRows, is_trained: Tensor | None, counters: Tensor) -> Tensor:
        """Bring the rows of a batch in, counted in ``counters``, int64, one for each
        :class:`CacheCounter`; how many slots are too few."""
        self._check_unchanged()
        claim = claim_slots(
            self.cache._replace(counters=counters),
            fetched.unique_rows,
            fetched.num_rows,
            epoch=fetched.epoch,
            released=self.clock.released,
            is_trained=is_trained,
        )
        self._exchange(claim.moves)
        if self._slot_keys is not None:
            slots = self.placed_rows(fetched.unique_rows)
            self._slot_keys.note(slots, fetched.unique_rows, super().rounding_keys)
        return claim.num_refused

    def _exchange(self, moves: RowMoves) -> None:
        """Bring rows into the cache for those that make room of them."""
        raise NotImplementedError

    def _write_dirty(self) -> None:
        """Write the rows of the cache that were trained since they were read to where they are
        stored."""
        moves = dirty_moves(self.cache)
        written = self._stored_places(moves.written_rows)
        move_rows(moves._replace(written_rows=written), self._cached, self._stored)

    def _check_unchanged(self) -> None:
        """Raise ``RuntimeError`` where a weight was changed in place that the cache does not
        follow."""
        raise NotImplementedError

    def _versions(self) -> list[int]:
        return [t.parameter._version for t in self.tables if hasattr(t, "parameter")]

    @interrupts_deferred()  # Once no row is dirty, no call would bring rows to their places.
    def write_back(self) -> None:
        """Write all rows of the cache that were trained since they were read to the host; they stay
        in the cache. Waits for a GPU."""
        if self.weight.is_meta or not self.cache.is_dirty.any():
            return
        self._write_dirty()
        # Those of batches that were prepared ahead are still to be trained.
        self.cache.is_dirty.copy_(self.cache.last_use > self.clock.released)
        if self.weight.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()
        self._order_stored()

    def _order_stored(self) -> None:
        """Bring each row to where it is expected in :attr:`stored_weight`, where rows may be in
        others' places. Waits for a GPU."""

    def forget_cached(self) -> None:
        """Empty the cache without writing its rows anywhere. Never waits for a GPU."""
        if not self.weight.is_meta:
            forget_rows(self.cache)
            self._num_emptied += 1
        self._versions_known = self._versions()

    def release(self, epoch: Tensor) -> None:
        super().release(epoch)
        self.clock.release(epoch)

    def release_prepared(self) -> None:
        super().release_prepared()
        self.clock.release_prepared()

    def release_forwards(self) -> None:
        super().release_forwards()
        self.clock.release_forwards()

    def placed_runs(self, runs: Runs) -> Runs:
        slots = find_cached(
            self.cache.slot_of_row,
            runs.unique_rows,
            num_rows=runs.num_runs,
            no_slot=self.weight.shape[0] - 1,
        )
        return runs._replace(unique_rows=slots)

    def placed_rows(self, rows: Tensor) -> Tensor:
        """The slot ``[L]`` of ``weight`` that holds each of ``rows``; -1 for row -1, and for rows
        that are not in the cache."""
        return find_cached(self.cache.slot_of_row, rows)

    def gathered_rows(self, rows: Tensor) -> Tensor:
        """``[L, D]``: a copy of each of ``rows``, wherever it is; zeros for row -1. Changes
        nothing."""
        slots, places = self.placed_rows(rows), self._stored_places(rows)
        return read_rows(self.weight[:-1], self._stored[0], slots, places)
