"""Groups of tables whose rows live in the memory of the host, behind a cache on the device."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

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
from torchembed.ops.rowwise_update import RoundingKeys, UpdateRule
from torchembed.ops.segments import Runs
from torchembed.tables.admission_clock import AdmissionClock
from torchembed.tables.group import ConvertedRows, TableGroup
from torchembed.tables.initializers import is_function_of_id
from torchembed.tables.row_index import Admission, NewRows, SlotIndex
from torchembed.tables.storage import rows_held
from torchembed.tables.table import Table
from torchembed.tables.tiers.host_memory import host_tensor
from torchembed.tables.tiers.row_lines import row_lines
from torchembed.tables.tiers.row_places import RowPlaces
from torchembed.tables.tiers.slot_keys import SlotKeys
from torchembed.tables.tiers.step_counters import new_step_counters

_FILLED_ELEMENTS = 1 << 24
"""Elements of initial rows that are made at a time."""
_MADE_AGAIN_BYTES = 1 << 32
"""Weights of so many bytes are not copied where they hold initial rows."""


class FetchedRows(NamedTuple):
    """The rows of a batch that were to be brought into a cache."""

    unique_rows: Tensor
    """``[L]``: the distinct rows, increasing; -1 from ``num_rows`` on."""
    num_rows: Tensor
    """int32 ``[1]``."""
    num_refused: Tensor
    """int64 ``[1]``: slots that the cache had too few; the rows that it did not hold before are not
    in it then."""
    epoch: Tensor
    """int64 ``[1]``: of the batch, as the cache counts."""
    num_emptied: Tensor
    """int64 ``[1]``: how often the cache had been emptied by then."""
    num_short: Tensor | None = None
    """int64 ``[1]``: places that the memory of the host had too few, of tables on disk."""
    may_be_late: Tensor | None = None
    """bool ``[1]``: False where the rows are not brought in at all, since the batch is not trained,
    or, of tables on disk, host memory does not hold them. None for a batch that is trained."""


class TieredGroup(TableGroup):
    """A group whose rows are in :attr:`stored_weight` and :attr:`stored_states`, on the host, and
    of which ``weight`` and ``states`` hold those that batches under way use, ``[C + 1, ...]``. The
    last of these is no row's: updates of rows that found no place go there.

    Rows have the numbers that they have in a group on the device: ids are routed to them, gradients
    recorded for them. Where ``weight`` holds a row is asked when it is looked up and when it is
    updated. A batch's rows are brought into the cache when it is admitted, and stay there until it
    is released; those that make room are written back.

    A row and its optimizer state lie side by side on the host, so that ``stored_weight`` and
    ``stored_states`` are views with gaps between their rows.

    Attributes:
        cache: which rows the slots of ``weight`` hold. Its counters are of rows that were written
            back, and of batches that were prepared ahead of their step.
        counters: of what the step itself brought in.
        clock: the epochs of the batches whose rows were brought in.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        stored_weight: Tensor,
        device: torch.device,
        *,
        keeps_weight: bool = False,
    ) -> None:
        """
        Args:
            stored_weight: ``[R, D]`` in the memory of the host.
            device: of the cache.
            keeps_weight: whether ``stored_weight`` stays where it is, apart from the states, since
                others use its memory.
        """
        self._keeps_weight = keeps_weight
        self._stored_weight = stored_weight
        self._stored_states: tuple[Tensor, ...] = ()
        self._slot_keys: SlotKeys | None = None
        for table in tables:
            table.cache_device = device
        num_columns = stored_weight.shape[1]
        super().__init__(tables, stored_weight.new_empty(1, num_columns, device=device))
        self._versions_known: list[int] = []
        self._was_emptied = True
        """True if weights may have been changed in place since the cache was emptied."""
        self._make_cache()

    def _make_cache(self) -> None:
        """Make the cache, without rows, of the size that the tables ask for."""
        device, weight = self.weight.device, self._stored_weight
        num_slots = sum(map(self._cache_rows_of, self.tables))
        self.cache: RowCache = empty_row_cache(self.num_rows, num_slots, device)
        self._make_places()
        self.counters = new_step_counters(device)
        self.clock = AdmissionClock(device)
        self._slot_keys = None
        self._num_emptied = torch.zeros(1, dtype=torch.int64, device=device)
        self.weight = weight.new_zeros(num_slots + 1, weight.shape[1], device=device)
        self.states = tuple(
            state.new_zeros(num_slots + 1, *state.shape[1:], device=device)
            for state in self._stored_states
        )
        self._was_emptied = True

    def _make_places(self) -> None:
        """Note where rows are stored: each at the place of its own number."""
        self._row_places = RowPlaces(self.num_rows, self.weight.device)

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
        """The stored weight and states for operations that write them: ``.data``, since these
        writes are no change in place to code that compares versions of parameters."""
        return [self._stored_weight.data, *self._stored_states]

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

    def set_rule(self, rule: UpdateRule, initial_state: float) -> None:
        self.write_back()
        self.rule, self.initial_state = rule, initial_state
        shape = rule.state_shape(*self._stored_weight.shape)
        self._make_states([shape] * rule.num_states)
        for state in self._stored_states:
            state.fill_(initial_state)
        self._make_cache()
        self._tell_row_bytes()
        self.step = torch.zeros(1, device=self.device)

    def _make_states(self, shapes: Sequence[Sequence[int]]) -> None:
        """Make memory for states of these shapes, side by side with the rows, which move there."""
        device = self.device
        if self._keeps_weight:
            self._stored_states = tuple(
                host_tensor(shape, torch.float32, device) for shape in shapes
            )
            return
        # The tables of a group that is being formed still are in others.
        has_tables = all(getattr(table, "group", None) is self for table in self.tables)
        is_large = self._stored_weight.nbytes >= _MADE_AGAIN_BYTES
        is_made_again = has_tables and is_large and self._holds_initial_rows()
        like = self._stored_weight.to("meta")
        if is_made_again:  # there need not be memory for all rows twice
            self._stored_weight = self._stored_weight.new_empty(0, like.shape[1])
            self._stored_states = ()
            for table in self.tables:
                table.parameter.data = self._stored_weight
        weight, *states = row_lines(like, shapes, device)
        if not is_made_again and not weight.is_meta:
            weight.copy_(self._stored_weight)
        self._stored_weight, self._stored_states = weight, tuple(states)
        if has_tables:
            self.point_parameters()
        if is_made_again:
            for table in self.tables:
                self._fill_by_pieces(table)

    def _holds_initial_rows(self) -> bool:
        """True where every row is as :meth:`fill_initial_rows` makes it. Waits for a GPU."""
        specs = [table.spec for table in self.tables]
        if self.weight.is_meta or self.index.changes_on_admission:
            return False
        if not all(is_function_of_id(spec.initializer) for spec in specs):
            return False
        for table in self.tables:
            rows = self.table_rows(self._stored_weight.detach(), table)
            for first, made in self._initial_pieces(table):
                if not torch.equal(rows[first : first + len(made)].to(made.device), made):
                    return False
        return True

    def _initial_pieces(self, table: Table) -> Iterator[tuple[int, Tensor]]:
        """The number of the first of some consecutive rows of ``table``, and their initial values
        ``[n, D]`` on the device, in memory of the next ones; all rows, one after the other."""
        row_ids, num_columns = self.row_ids(table), self.weight.shape[1]
        num_rows = max(_FILLED_ELEMENTS // max(num_columns, 1), 1)
        made = self.weight.new_empty(min(num_rows, table.num_rows), num_columns)
        for first in range(0, table.num_rows, num_rows):
            of_piece = row_ids[first : min(first + num_rows, table.num_rows)]
            piece = made[: len(of_piece)]
            table.fill_rows(piece, of_piece)
            yield first, piece

    def _fill_by_pieces(self, table: Table) -> None:
        weight = self.table_rows(self._stored_weight.detach(), table)
        for first, piece in self._initial_pieces(table):
            # A copy from a GPU to lines, between which there is space, goes through memory of the
            # host that is not locked.
            slots = torch.arange(len(piece), dtype=torch.int32, device=piece.device)
            written = first + slots.long()
            count = torch.full((1,), len(piece), device=piece.device)
            moves = RowMoves(slots, written, torch.full_like(written, -1), count)
            move_rows(moves, [piece], [weight])
        if weight.is_cpu and self.weight.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    @torch.no_grad()
    def fill_initial_rows(self, table: Table) -> None:
        """As the overridden method; on a GPU, which is faster and gives the bits that it gives
        tables on the device."""
        if self.device.type != "cuda" or not is_function_of_id(table.spec.initializer):
            super().fill_initial_rows(table)
            return
        self.write_back()
        self._fill_by_pieces(table)
        self.forget_cached()

    def check_convertible(self, convert: Callable[[Tensor], Tensor]) -> None:
        """Raise ``TypeError`` where ``convert`` gives the rows a dtype that caches do not hold."""
        dtype = convert(self.weight[:0]).dtype
        if dtype not in FLOAT_DTYPES:
            names = ", ".join(table.spec.name for table in self.tables)
            raise TypeError(
                f"tables {names} in host memory must be float32, float16 or bfloat16, got {dtype} "
                "to convert them to; leave them out, or keep them on the device"
            )

    def converted(self, convert: Callable[[Tensor], Tensor]) -> ConvertedRows:
        self.write_back()
        like = convert(self.weight[:0])
        stored = self._stored_weight
        if (stored.dtype, self.device) == (like.dtype, like.device):
            return ConvertedRows(stored, like.device)
        made = host_tensor(stored.shape, like.dtype, like.device)
        if not stored.is_meta and not like.is_meta:
            made.copy_(stored)
        return ConvertedRows(made, like.device)

    def convert(self, rows: ConvertedRows) -> None:
        was_meta, (weight, device) = self._stored_weight.is_meta, rows
        states = self._stored_states
        is_moved = weight is not self._stored_weight
        self._stored_weight = weight
        if is_moved and states and not was_meta:
            shapes = [state.shape for state in states]
            weight, *made = row_lines(weight, shapes, device)
            if device.type != "meta":
                for new, old in zip((weight, *made), (self._stored_weight, *states), strict=True):
                    new.copy_(old)
            self._stored_weight, self._stored_states = weight, tuple(made)
        self.weight = weight.new_empty(1, weight.shape[1], device=device)
        for table in self.tables:
            table.cache_device = device
        self._make_cache()
        if was_meta and self.rule is not None:
            self.set_rule(self.rule, self.initial_state)
        self.step = torch.zeros(1, device=device) if was_meta else self.step.to(device)
        self.pending.to(device)
        self._set_index(self.index.to(device))
        self.point_parameters()

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
        initialize_rows(
            self._stored[0],
            self._stored_states,
            torch.where(slots < 0, self._stored_places(new.rows), -1),
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
            RuntimeError: where a weight was changed in place while the cache may hold other values.
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
        move_rows(self._row_places.exchanged(moves), self._cached, self._stored)

    def _write_dirty(self) -> None:
        """Write the rows of the cache that were trained since they were read to where they are
        stored."""
        moves = dirty_moves(self.cache)
        written = self._stored_places(moves.written_rows)
        move_rows(moves._replace(written_rows=written), self._cached, self._stored)

    def _stored_places(self, rows: Tensor) -> Tensor:
        """Where in :attr:`_stored` each of ``rows`` lies, -1 for row -1."""
        return self._row_places.find(rows)

    def _check_unchanged(self) -> None:
        """Empty the cache where weights were changed in place, and it holds nothing that was
        trained since it was emptied last.

        Raises:
            RuntimeError: where it does.
        """
        versions = self._versions()
        if versions == self._versions_known:
            self._was_emptied = False
            return
        if not self._was_emptied and self.cache.is_dirty.any():
            names = ", ".join(table.spec.name for table in self.tables)
            raise RuntimeError(
                f"weight of one of the tables {names} was changed in place while the cache on the "
                "device held rows of it that were trained since; call write_back() of the module "
                "before changing it"
            )
        if not self._was_emptied:
            self.forget_cached()
        self._was_emptied, self._versions_known = False, versions

    def _versions(self) -> list[int]:
        return [t.parameter._version for t in self.tables if hasattr(t, "parameter")]

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
        """Bring each row to where it is expected in :attr:`stored_weight`. Waits for a GPU."""
        self._row_places.restore(self._stored)

    def forget_cached(self) -> None:
        """Empty the cache without writing its rows anywhere. Never waits for a GPU."""
        if not self.weight.is_meta:
            forget_rows(self.cache)
            self._num_emptied += 1
        self._was_emptied, self._versions_known = True, self._versions()

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
