"""Groups of tables whose rows live in the memory of the host, behind a cache on the device."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torchembed.ops.row_cache import RowMoves, move_rows
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.tables.group import ConvertedRows
from torchembed.tables.initializers import is_function_of_id
from torchembed.tables.table import Table
from torchembed.tables.tiers.host_memory import host_tensor
from torchembed.tables.tiers.row_lines import row_lines
from torchembed.tables.tiers.row_places import RowPlaces
from torchembed.tables.tiers.tiered_group import TieredGroup

_FILLED_ELEMENTS = 1 << 24
"""Elements of initial rows that are made at a time."""
_MADE_AGAIN_BYTES = 1 << 32
"""Weights of so many bytes are not copied where they hold initial rows."""


class HostGroup(TieredGroup):
    """A group whose rows are all in the memory of the host.

    A row and its optimizer state lie side by side there, so that ``stored_weight`` and
    ``stored_states`` are views with gaps between their rows.
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
        super().__init__(tables, stored_weight, device)

    def _make_cache(self) -> None:
        self._row_places = RowPlaces(self.num_rows, self.weight.device)
        super()._make_cache()
        self._was_emptied = True
        """True if weights may have been changed in place since the cache was emptied."""

    @property
    def _stored(self) -> list[Tensor]:
        """The stored weight and states for operations that write them: ``.data``, since these
        writes are no change in place to code that compares versions of parameters."""
        return [self._stored_weight.data, *self._stored_states]

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
        self._settle_on(device, was_meta=was_meta)

    def _exchange(self, moves: RowMoves) -> None:
        move_rows(self._row_places.exchanged(moves), self._cached, self._stored)

    def _stored_places(self, rows: Tensor) -> Tensor:
        return self._row_places.find(rows)

    def _check_unchanged(self) -> None:
        """Empty the cache where weights were changed in place, and it holds nothing that was
        trained since it was emptied last.

        Raises:
            RuntimeError: if it does.
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

    def _order_stored(self) -> None:
        self._row_places.restore(self._stored)

    def forget_cached(self) -> None:
        super().forget_cached()
        self._was_emptied = True
