"""Changes of a model's dynamic tables since an earlier moment, which marks of the tables name."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from torchembed.core import ranks
from torchembed.modules.table_module import TableModule
from torchembed.tables import DeltaMark, SnapshotDueError, Table, TableDelta, table_of


class ModelChanges(NamedTuple):
    """The changes of what this rank holds, or that all of it is due."""

    is_whole: bool
    """True, on all ranks alike, where changes cannot be told and whole tables are due."""
    tables: dict[str, TableDelta]
    """By the weights of dynamic tables; empty where whole tables are due."""
    marks: dict[str, DeltaMark]
    """The marks of this moment, by the names of modules."""


def dynamic_tables(model: nn.Module) -> dict[str, Table]:
    """This rank's part of the dynamic tables of ``model``, by their weights' names."""
    found = ((name, table_of(parameter)) for name, parameter in model.named_parameters())
    return {n: table for n, table in found if table is not None and table.spec.num_ids is None}


def current_marks(model: nn.Module) -> dict[str, DeltaMark]:
    """The marks of this moment, by the names of modules with dynamic tables; collective."""
    return {name: module.delta_mark() for name, module in _modules(model).items()}


def changes_since(
    model: nn.Module, marks: Mapping[str, DeltaMark], *, is_whole: bool = False
) -> ModelChanges:
    """The changes since ``marks``; collective, between two steps. Waits for a GPU.

    Args:
        model: which all ranks have.
        marks: by the names of modules; whole tables are due where they are of other modules.
        is_whole: True on any rank asks for whole tables on all.

    Raises:
        ValueError: for a table without a ``deletion_log``, or whose columns are divided over ranks.
    """
    modules, deltas = _modules(model), {}
    is_whole = ranks.any_rank(is_whole or marks.keys() != modules.keys())
    for name, module in () if is_whole else modules.items():
        try:
            deltas[name] = module.delta(marks[name])
        except SnapshotDueError:
            is_whole = True
    if ranks.any_rank(is_whole):
        return ModelChanges(True, {}, current_marks(model))
    weights = {id(table): weight for weight, table in dynamic_tables(model).items()}
    changed = {
        weights[id(table)]: delta.tables[table.spec.name]
        for name, delta in deltas.items()
        for table in modules[name].table_set.tables
        if id(table) in weights
    }
    return ModelChanges(False, changed, {name: delta.mark for name, delta in deltas.items()})


def _modules(model: nn.Module) -> dict[str, TableModule]:
    named = model.named_modules()
    return {n: m for n, m in named if isinstance(m, TableModule) and m.has_dynamic_tables}
