"""The tables of one module, sorted into groups that follow what becomes of the parameters."""

import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import Dynamo at once

from torchembed.core.stand_ins import (
    address_of,
    addresses_of,
    is_stand_in,
    makes_stand_ins,
    making_real_tensors,
)
from torchembed.tables.group import TableGroup
from torchembed.tables.new_groups import group_over, may_hold, new_group
from torchembed.tables.storage import Disk, HostMemory, Storage
from torchembed.tables.table import Table, mark_parameter, table_of

_forming = threading.RLock()

_Parameters: TypeAlias = tuple[list[int], list[bool]]
"""The address of each table's rows, and for each table True if it trains."""


class TableSet:
    """The tables of one module and the groups that they form.

    Tables share a group where the number of columns held here, kind of index, storage (of those in
    host memory whatever its sizes), dtype, device, ``lookup_keys`` (what their lookups must have in
    common), the optimizer that updates them and ``requires_grad`` are equal.
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
        for members in self._partition(lambda table: table.spec.dtype).values():
            group = new_group(members, members[0].spec.dtype, device)
            for table in members:
                table.owner = self
                table.parameter = nn.Parameter(group.table_rows(group.stored_weight, table))
            group.point_parameters()
            self.groups.append(group)
        self._formed_for = self._parameters_now()
        self._num_changes = 0
        self.fill_initial_rows()

    @classmethod
    def over(cls, groups: Sequence[TableGroup]) -> "TableSet":
        """The tables of ``groups``, which stay as they are, weights and optimizer states too.

        A table gets a parameter of its own, which trains, over its group's weight.
        """
        made = cls.__new__(cls)
        made.groups, made.tables, made.lookup_keys = list(groups), [], []
        made._num_changes = 0
        for number, group in enumerate(groups):
            for table in group.tables:
                table.owner = made
                table.parameter = nn.Parameter(group.table_rows(group.stored_weight, table))
                made.tables.append(table)
                made.lookup_keys.append(number)
            group.point_parameters()
        made._formed_for = made._parameters_now()
        return made

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles form their groups anew, without optimizer state."""
        return {**vars(self), "groups": [], "_formed_for": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        for table in self.tables:
            table.owner = self

    def _partition(self, key: Callable[[Table], Hashable]) -> dict[Hashable, list[Table]]:
        groups: dict[Hashable, list[Table]] = {}
        for table, lookup_key in zip(self.tables, self.lookup_keys, strict=True):
            full_key = (
                table.num_columns,
                table.spec.index,
                _cache_key(table.spec.storage),
                lookup_key,
                table.gradient_reduction,
                key(table),
            )
            groups.setdefault(full_key, []).append(table)
        return groups

    def _parameters_now(self) -> _Parameters:
        parameters = [table.parameter for table in self.tables]
        return addresses_of(parameters), [parameter.requires_grad for parameter in parameters]

    @torch.no_grad()
    def fill_initial_rows(self) -> None:
        """Give every row the value that its table's initializer, seed and number define."""
        for table in self.tables:
            table.fill_initial_rows()

    def current_groups(self) -> list[TableGroup]:
        """The groups, brought in line first where a parameter was frozen or given other rows.

        The list is another one after each change. Costs two attribute reads a table.
        """
        if self._formed_for != self._parameters_now():
            # Dynamo cannot trace it; keeping it from that imports Dynamo, which takes a second.
            is_compiled = "torch._dynamo" in sys.modules
            (self._form_groups_untraced if is_compiled else self._form_real_groups)()
        return self.groups

    def follow_parameters(self) -> int:
        """:meth:`current_groups` for Dynamo, which calls it while it traces; the number of groups.

        Dynamo traces again where a parameter is frozen, and finds other groups then. Tables in host
        memory are brought up to date: an exported program is saved with what their parameters hold.
        """
        groups = self.current_groups()
        with making_real_tensors():
            for group in groups:
                group.check_whole("a program of torch.compile")
                group.write_back()
        return len(groups)

    # What torch.compiler.assume_constant_result does, which would import Dynamo at once.
    follow_parameters._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def current_form(self) -> tuple[list[TableGroup], _Parameters | None, int]:
        """:meth:`current_groups`, of each table where its rows lie and whether it trains, and how
        often a group was given others to be updated with, or ids other rows: another form after
        each change of these."""
        return self.current_groups(), self._formed_for, self._num_changes

    def note_change(self) -> None:
        """Note that a group is updated together with other ones than before, or that ids of dynamic
        tables have other rows, as after a load."""
        self._num_changes += 1

    def note_growth(self) -> None:
        """Note that tables of groups have more rows, in other memory."""
        self.groups = list(self.groups)
        self._formed_for = self._parameters_now()

    @_disable_dynamo
    def _form_groups_untraced(self) -> None:
        self._form_real_groups()

    def _form_real_groups(self) -> None:
        """:meth:`form_groups`, which a fake call may not give fake weights; of several threads that
        look up at once, one does it."""
        with _forming:
            if self._formed_for != self._parameters_now():
                self._form_groups_outside_fake_calls()

    def _form_groups_outside_fake_calls(self) -> None:
        if makes_stand_ins() and not any(is_stand_in(table.parameter) for table in self.tables):
            with making_real_tensors():
                self.form_groups()
        else:
            self.form_groups()

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def form_groups(self) -> None:
        """Bring the groups in line with the tables' parameters and update keys.

        Call it after parameters were replaced or loaded, or an optimizer took tables over. Rows,
        and optimizer state where it moves along, are copied once; tables that come together have
        done the most steps that one of them has.

        Raises:
            ValueError: for a parameter of another shape than its table; nothing is changed then.
            RuntimeError: if gradients are pending in a group that changes; likewise.
        """
        current = {tuple(map(id, group.tables)): group for group in self.groups}
        formed: list[tuple[list[Table], TableGroup | None]] = []
        for members in self._partition(_group_key).values():
            group = current.get(tuple(map(id, members)))
            if group is None or not group.holds_parameters():
                _check_movable(members)
                group = None
            else:
                for table in members:
                    # Another parameter over the same rows.
                    if table_of(table.parameter) is None:
                        mark_parameter(table)
            formed.append((members, group))
        self.groups = [group or _gathered_group(members) for members, group in formed]
        self._formed_for = self._parameters_now()


def _group_key(table: Table) -> Hashable:
    parameter = table.parameter
    device = parameter.device if table.cache_device is None else table.cache_device
    return parameter.dtype, device, parameter.requires_grad, table.update_key


def _check_movable(members: list[Table]) -> None:
    for table in members:
        spec, shape = table.spec, (table.num_rows, table.num_columns)
        if tuple(table.parameter.shape) != shape:
            raise ValueError(
                f"weight of table {spec.name} must have shape {shape}, "
                f"got {tuple(table.parameter.shape)}"
            )
        if isinstance(spec.storage, Disk) and not table.parameter.is_meta:
            raise ValueError(
                f"weight of table {spec.name} on disk must not be replaced, got a tensor on "
                f"{table.parameter.device}; write rows by torchembed.checkpoints.load_rows, or "
                "load a checkpoint"
            )
        if hasattr(table, "group") and (table.group.pending or table.group.num_awaited):
            raise RuntimeError(
                f"table {spec.name} has gradients that no optimizer step has applied; call step() "
                "or zero_grad() before freezing, reloading or regrouping it"
            )


def _owns_memory(table: Table) -> bool:
    """True if the memory of the table's parameter holds nothing else, and is no group's of several
    tables, all of whose memory it would keep."""
    rows = table.parameter.data
    if not rows.is_contiguous() or rows.untyped_storage().nbytes() != rows.nbytes:
        return False
    if not hasattr(table, "group") or len(table.group.tables) == 1:
        return True
    weight = table.group.stored_weight
    first = address_of(weight)
    return not first <= address_of(rows) < first + weight.nbytes


def _cache_key(storage: Storage | None) -> Hashable:
    """The key that tables which share a cache have in common: those in host memory add up its
    size."""
    return HostMemory if isinstance(storage, HostMemory) else storage


def _gathered_group(members: list[Table]) -> TableGroup:
    """A new group with the rows, state, rule and step that ``members`` have in their old ones."""
    first = members[0].parameter.data
    for group in {table.group for table in members if hasattr(table, "group")}:
        group.write_back()
    if len(members) == 1 and _owns_memory(members[0]) and may_hold(members[0], first):
        group = group_over(members, first)
    else:
        device = first.device if members[0].cache_device is None else members[0].cache_device
        group = new_group(members, first.dtype, device)
        for table in members:
            group.table_rows(group.stored_weight, table).copy_(table.parameter.data)
    old_groups = [table.group for table in members if hasattr(table, "group")]
    group.take_contents_of_index(old_groups)
    for number, table in enumerate(members):
        if table.kept_contents is not None:
            group.index.load_contents(number, table.kept_contents)
            table.kept_contents = None
    rules = {old.rule for old in old_groups}
    rule = rules.pop() if len(rules) == 1 else None
    if rule is not None:
        group.set_rule(rule, old_groups[0].initial_state)
        group.step = torch.stack([old.step.to(group.device) for old in old_groups]).amax(0)
        for table, old in zip(members, old_groups, strict=True):
            for new_state, old_state in zip(group.stored_states, old.stored_states, strict=True):
                group.table_rows(new_state, table).copy_(old.table_rows(old_state, table))
    group.take_stored_rows(old_groups)
    group.point_parameters()
    return group
