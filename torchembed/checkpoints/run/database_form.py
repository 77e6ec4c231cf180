"""The forms of databases of tables on disk in checkpoints: which rows their lines are."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torchembed.core.random_bits import name_key
from torchembed.tables import (
    Constant,
    DiskGroup,
    HashFactory,
    Initializer,
    Normal,
    Table,
    TableGroup,
    Uniform,
    table_of,
)

DATABASES = "databases."
"""The beginning of the names of a checkpoint's entries that hold forms of databases."""

_INITIALIZERS = {kind.__name__: kind for kind in (Uniform, Normal, Constant)}


class InitialRows(NamedTuple):
    """The values of rows for which no line was written, as functions of their ids."""

    name: str
    """The table's name."""
    seed: int
    initializer: str
    numbers: dict[str, float]
    """The initializer's fields."""
    zero_row: int | None
    """A row of zeros; None where there is none."""

    @classmethod
    def of(cls, table: Table) -> "InitialRows":
        """The initial rows of a table."""
        initializer = table.spec.initializer
        numbers = dict(vars(initializer))
        if isinstance(initializer, Uniform):
            low, high = initializer.bounds(table.spec.num_rows)
            numbers = {"low": low, "high": high}
        spec, kind = table.spec, type(initializer).__name__
        return cls(spec.name, spec.seed, kind, numbers, spec.zero_row)

    def fill(self, rows: Tensor, ids: Tensor, first_column: int) -> None:
        """Fill ``rows [n, columns]`` with those of ``ids``, int64 ``[n]``."""
        initializer: Initializer = _INITIALIZERS[self.initializer](**self.numbers)
        key = name_key(self.seed, self.name)
        initializer.fill(rows, key, ids, first_column, len(rows))
        if self.zero_row is not None:
            rows[ids == self.zero_row] = 0


class DatabasePart(NamedTuple):
    """The part of a table whose rows are in a database, one after the other."""

    weight: str
    """The entry of the whole table's rows."""
    states: dict[str, str]
    """The entries of their optimizer state, by the names of states."""
    size: tuple[int, ...]
    """Shape of the whole table's rows, ``[R, D]``."""
    offsets: tuple[int, ...]
    """The first row and column of the part."""
    shape: tuple[int, ...]
    """Its rows and columns."""
    first_line: int
    """The number of its first row's line."""
    initial: InitialRows | None
    """None where every row that is looked up has a line: in a dynamic table, but for rows that ids
    share."""
    is_dynamic: bool

    @classmethod
    def of(cls, table: Table, name: str, states: dict[str, str]) -> "DatabasePart":
        """The part of a table that this rank holds.

        Args:
            name: of its parameter in the model.
            states: the entries of its optimizer state, by the names of states.
        """
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        whole = table.as_global(table.parameter.detach())
        planner.set_up_planner({name: whole}, None, is_coordinator=True)
        (item,) = planner.create_local_plan().items
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        return cls(
            weight=f"model.{name}",
            states=states,
            size=tuple(item.tensor_data.size),
            offsets=tuple(chunk.offsets),
            shape=tuple(chunk.sizes),
            first_line=table.group.first_row_of(table),
            initial=None if num_hashed_rows(table) == 0 else InitialRows.of(table),
            is_dynamic=table.spec.num_ids is None,
        )


class DatabaseForm(NamedTuple):
    """The form of a database: its lines are the bytes of a row and of its optimizer state."""

    dtype: str
    """The dtype of rows; states are float32."""
    state_columns: dict[str, int | None]
    """The columns of each state by its name, in their order in a line; None for one number."""
    initial_state: float
    parts: tuple[DatabasePart, ...]

    @classmethod
    def of(cls, group: TableGroup, parts: Sequence[DatabasePart]) -> "DatabaseForm":
        """The form of a group's rows as lines.

        Args:
            parts: of the group's tables, in their order.
        """
        names = () if group.rule is None else group.rule.state_names
        columns = {
            name: None if state.dim() == 1 else state.shape[1]
            for name, state in zip(names, group.stored_states, strict=True)
        }
        dtype = str(group.weight.dtype).removeprefix("torch.")
        return cls(dtype, columns, group.initial_state, tuple(parts))

    def tensors(self, num_rows: int) -> list[Tensor]:
        """Uninitialized rows of a weight and its states, on the CPU."""
        columns = self.parts[0].shape[1]
        weight = torch.empty(num_rows, columns, dtype=getattr(torch, self.dtype))
        shapes = ((num_rows,) if n is None else (num_rows, n) for n in self.state_columns.values())
        return [weight, *map(torch.empty, shapes)]


class SavedDatabase(NamedTuple):
    """A database in a checkpoint."""

    folder: str | None
    """Its folder there; None where no line was written."""
    form: DatabaseForm


def disk_names(model: nn.Module) -> dict[str, Table]:
    """The tables on disk that this rank holds a part of, by each name of their parameter."""
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        table = table_of(parameter)
        if table is not None and isinstance(table.group, DiskGroup):
            found[name] = table
    return found


def disk_groups(model: nn.Module) -> list[DiskGroup]:
    """The groups of the tables on disk that this rank holds a part of, in the model's order."""
    groups = dict.fromkeys(table.group for table in disk_names(model).values())
    return [group for group in groups if isinstance(group, DiskGroup)]


def num_hashed_rows(table: Table) -> int | None:
    """The last rows of a dynamic table, which ids without one of their own share; None for a static
    table."""
    factory = table.spec.index
    return factory.dynamic.num_hashed_rows if isinstance(factory, HashFactory) else None


def to_tensor(databases: Sequence[SavedDatabase]) -> Tensor:
    """Forms as uint8 ``[n]``."""
    content = [(database.folder, _plain(database.form)) for database in databases]
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def _plain(form: DatabaseForm) -> dict[str, Any]:
    parts = [
        {**part._asdict(), "initial": None if part.initial is None else part.initial._asdict()}
        for part in form.parts
    ]
    return {**form._asdict(), "parts": parts}


def parse(tensor: Tensor) -> list[SavedDatabase]:
    """The forms of which :func:`to_tensor` gave ``tensor``."""
    found = []
    for folder, form in json.loads(tensor.numpy().tobytes()):
        parts = []
        for part in form["parts"]:
            shapes = {name: tuple(part[name]) for name in ("size", "offsets", "shape")}
            initial = None if part["initial"] is None else InitialRows(**part["initial"])
            parts.append(DatabasePart(**{**part, **shapes, "initial": initial}))
        found.append(SavedDatabase(folder, DatabaseForm(**{**form, "parts": tuple(parts)})))
    return found
