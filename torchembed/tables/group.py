"""Tables, and the groups that hold the rows of many tables in one flat tensor."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn

from torchembed.core.random_bits import name_key
from torchembed.ops.rowwise_update import RoundingKeys, RowGradients, UpdateRule
from torchembed.tables.initializers import Initializer, Uniform, shifted_row_key


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSpec:
    """A whole table, wherever its rows are."""

    name: str
    num_rows: int
    dim: int
    dtype: torch.dtype = torch.float32
    initializer: Initializer = Uniform()
    seed: int = 0

    @property
    def key(self) -> int:
        """64-bit key of the table's initial rows and of its rounding."""
        return name_key(self.seed, self.name)


class Table:
    """The rows ``[first_row, first_row + num_rows)`` of a table, in one group on one device.

    ``parameter`` is a ``[num_rows, dim]`` view of the group's weight: what ``state_dict``, any
    ``torch.optim`` optimizer and other libraries see.
    """

    def __init__(self, spec: TableSpec, *, first_row: int = 0, num_rows: int | None = None) -> None:
        self.spec = spec
        self.first_row = first_row
        self.num_rows = spec.num_rows - first_row if num_rows is None else num_rows
        self.parameter: nn.Parameter
        self.group: TableGroup
        self.owner: TableSet
        self.update_key: Hashable = None
        """Which optimizer and parameter group update the table; None: weight.grad appears."""


class TableGroup:
    """Tables of one dim and dtype that are looked up and updated in one call.

    Attributes:
        weight: ``[R, D]``, the rows of all tables, one after the other. The tables' parameters are
            views of it.
        row_offsets: int64 ``[T + 1]`` on the weight's device, and as a list on the host in
            ``first_rows``: where each table begins.
        states: optimizer state, flat like ``weight``; made by :meth:`set_rule`.
        step: float32 ``[1]``, updates done.
        pending: gradients recorded by backward and not yet applied, oldest first.
    """

    def __init__(self, tables: Sequence[Table], weight: Tensor) -> None:
        self.tables = list(tables)
        self.weight = weight
        self.first_rows = [0]
        for table in tables:
            self.first_rows.append(self.first_rows[-1] + table.num_rows)
        self.states: tuple[Tensor, ...] = ()
        self.rule: UpdateRule | None = None
        self.step = torch.zeros(1, device=weight.device)
        self.pending: list[tuple[Tensor, RowGradients]] = []
        self.grad_multiplier: Tensor | None = None
        self._locate()

    def _locate(self) -> None:
        device = self.weight.device
        self.row_offsets = torch.tensor(self.first_rows, dtype=torch.int64, device=device)
        keys = [
            shifted_row_key(table.spec.key, table.first_row - first)
            for table, first in zip(self.tables, self.first_rows, strict=False)
        ]
        self.rounding_keys = RoundingKeys(
            self.row_offsets, torch.tensor(keys, dtype=torch.int64, device=device)
        )

    @property
    def num_rows(self) -> int:
        return self.weight.shape[0]

    @property
    def rows_dtype(self) -> torch.dtype:
        """The integer type in which rows of this group are passed to operations."""
        return torch.int32 if self.num_rows < 2**31 else torch.int64

    def table_rows(self, tensor: Tensor, table: Table) -> Tensor:
        """The part of ``tensor [R, ...]`` that belongs to ``table``, a view."""
        index = self.tables.index(table)
        return tensor[self.first_rows[index] : self.first_rows[index + 1]]

    def point_parameters(self) -> None:
        """Make each table's parameter a view of ``weight``, keeping its identity where it can."""
        for table in self.tables:
            rows = self.table_rows(self.weight, table)
            table.parameter.data = rows
            table.group = self
            mark_parameter(table)

    def holds_parameters(self) -> bool:
        """True where every parameter still is the view of ``weight`` that it should be."""
        return all(
            table.parameter.data_ptr() == self.table_rows(self.weight, table).data_ptr()
            and table.parameter.device == self.weight.device
            and table.parameter.dtype == self.weight.dtype
            for table in self.tables
            if table.num_rows
        ) and all(table.parameter.device == self.weight.device for table in self.tables)

    def set_rule(self, rule: UpdateRule, initial_state: float) -> None:
        """Let ``rule`` update the rows: makes the state (all ``initial_state``), and from now on
        backward records gradients in ``pending`` instead of giving the parameters one."""
        self.rule = rule
        shape = rule.state_shape(*self.weight.shape)
        self.states = tuple(
            torch.full(shape, initial_state, device=self.weight.device)
            for _ in range(rule.num_states)
        )

    def record(self, rows: Tensor, gradients: RowGradients) -> None:
        """Keep the gradients of ``rows`` until the optimizer's step; the sink of a lookup."""
        self.pending.append((rows, gradients))

    def merged_pending(self) -> tuple[Tensor, RowGradients] | None:
        """All pending gradients as one entry, or None where there are none."""
        if len(self.pending) <= 1:
            return self.pending[0] if self.pending else None
        rows, gradient_rows, scales, first = [], [], [], 0
        for entry_rows, (grad, entry_gradient_rows, entry_scales) in self.pending:
            rows.append(entry_rows)
            if entry_gradient_rows is None:
                entry_gradient_rows = torch.arange(entry_rows.numel(), device=grad.device)
            gradient_rows.append(entry_gradient_rows.long() + first)
            if entry_scales is None:
                entry_scales = torch.ones(entry_rows.numel(), device=grad.device)
            scales.append(entry_scales)
            first += grad.shape[0]
        grads = torch.cat([gradients.grad for _, gradients in self.pending])
        return torch.cat(rows), RowGradients(grads, torch.cat(gradient_rows), torch.cat(scales))


def mark_parameter(table: Table) -> None:
    table.parameter.torchembed_table = table  # type: ignore[attr-defined]


def table_of(parameter: Tensor) -> Table | None:
    """The table whose rows ``parameter`` is, or None for any other tensor."""
    return getattr(parameter, "torchembed_table", None)


class TableSet:
    """The tables of one module and the groups that they form.

    Tables share a group where dim, dtype, ``lookup_keys`` (what their lookups must have in common),
    the optimizer that updates them and ``requires_grad`` are equal.
    """

    def __init__(
        self,
        tables: Iterable[Table],
        lookup_keys: Sequence[Hashable],
        device: torch.device | str | None = None,
    ) -> None:
        self.tables = list(tables)
        self.lookup_keys = list(lookup_keys)
        self.groups: list[TableGroup] = []
        for members in self._partition(lambda table: None).values():
            spec = members[0].spec
            num_rows = sum(table.num_rows for table in members)
            weight = torch.empty(num_rows, spec.dim, dtype=spec.dtype, device=device)
            group = TableGroup(members, weight)
            for table in members:
                table.owner = self
                table.parameter = nn.Parameter(group.table_rows(weight, table))
            group.point_parameters()
            self.groups.append(group)
        if device is None or torch.device(device).type != "meta":
            self.fill_initial_rows()

    def _partition(self, update_part: Callable[[Table], Hashable]) -> dict[Hashable, list[Table]]:
        groups: dict[Hashable, list[Table]] = {}
        for table, lookup_key in zip(self.tables, self.lookup_keys, strict=True):
            key = (table.spec.dim, table.spec.dtype, lookup_key, update_part(table))
            groups.setdefault(key, []).append(table)
        return groups

    @torch.no_grad()
    def fill_initial_rows(self) -> None:
        """Give every row the value that its table's initializer, seed and number define."""
        for table in self.tables:
            spec = table.spec
            spec.initializer.fill(table.parameter.data, spec.key, table.first_row, spec.num_rows)

    @torch.no_grad()
    def form_groups(self) -> bool:
        """Bring the groups in line with the tables' parameters and update keys. True on a change.

        Call it after parameters were moved, replaced or loaded, or an optimizer took tables over.
        Rows, and optimizer state where it moves along, are copied once; pending gradients must have
        been applied before.
        """
        partition = self._partition(lambda table: (table.update_key, table.parameter.requires_grad))
        wanted = [(members, members[0].parameter) for members in partition.values()]
        current = {tuple(map(id, group.tables)): group for group in self.groups}
        groups, changed = [], False
        for members, parameter in wanted:
            group = current.get(tuple(map(id, members)))
            if group is None or not group.holds_parameters():
                group = _gathered_group(members, parameter)
                changed = True
            groups.append(group)
        self.groups = groups
        return changed


def _gathered_group(members: list[Table], like: Tensor) -> TableGroup:
    """A new group with the rows, state, rule and step that ``members`` have in their old ones."""
    num_rows = sum(table.num_rows for table in members)
    group = TableGroup(members, like.new_empty(num_rows, members[0].spec.dim))
    old_groups = [table.group for table in members]
    if any(old.pending for old in old_groups):
        names = ", ".join(table.spec.name for table in members)
        raise RuntimeError(
            f"tables {names} have gradients that no optimizer step has applied; call step() or "
            "zero_grad() before moving, reloading or regrouping them"
        )
    rules = {old.rule for old in old_groups}
    rule = rules.pop() if len(rules) == 1 else None
    if rule is not None:
        group.set_rule(rule, 0.0)
        group.step.copy_(old_groups[0].step)
    for table, old in zip(members, old_groups, strict=True):
        group.table_rows(group.weight, table).copy_(table.parameter.data)
        for new_state, old_state in zip(group.states, old.states, strict=False):
            group.table_rows(new_state, table).copy_(old.table_rows(old_state, table))
    group.point_parameters()
    return group
