"""Rows of a table with their optimizer state, in and out by key, some at a time."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.tables.table import Table


class RowChunk(NamedTuple):
    """Some rows of a table: what checkpoints, export and resharding read and write.

    A key is the number of a row in the whole table, wherever its rows are; in a dynamic table, and
    in files of such, it is an id: any number of 64 bits.
    """

    keys: Tensor
    """int64 ``[n]``, on the CPU, each at most once."""
    rows: Tensor
    """``[n, D]``, of the columns that the table holds here."""
    states: Mapping[str, Tensor]
    """Optimizer state by the name that the rule gives it, float32 ``[n, D]`` or ``[n]``."""
    scores: Tensor | None = None
    """int64 ``[n]``: by which a dynamic table that is full keeps rows, the greatest longest."""
    touched: Tensor | None = None
    """int64 ``[n]``: the step that used the row last, as whoever wrote the rows counted steps."""


def row_ranges(num_rows: int, row_bytes: int, max_bytes: int) -> Iterator[range]:
    """``range(num_rows)`` in parts of at most ``max_bytes``, or one row where a row is larger."""
    step = max(max_bytes // max(row_bytes, 1), 1)
    for first in range(0, num_rows, step):
        yield range(first, min(first + step, num_rows))


def read_rows(table: Table, keys: range, *, with_states: bool = True) -> RowChunk:
    """Rows of consecutive keys; the chunk's tensors but the keys are views of the table's memory.

    Raises:
        IndexError: where the table does not hold all of them here.
    """
    begin, end = keys.start - table.first_row, keys.stop - table.first_row
    if keys.step != 1 or not 0 <= begin <= end <= table.num_rows:
        raise IndexError(
            f"keys must be consecutive and in {_held(table)}, which table {table.spec.name} holds "
            f"here, got {keys}"
        )
    states = _states(table) if with_states else {}
    return RowChunk(
        torch.arange(keys.start, keys.stop),
        table.parameter.data[begin:end],
        {name: state[begin:end] for name, state in states.items()},
    )


def row_chunks(table: Table, max_bytes: int, *, with_states: bool = True) -> Iterator[RowChunk]:
    """All rows that the table holds here, in ascending order of their keys; views, as
    :func:`read_rows` gives them.

    Args:
        max_bytes: of a chunk's rows and states; a chunk has at least one row.
    """
    tensors = [table.parameter.data, *(_states(table).values() if with_states else ())]
    row_bytes = sum(tensor[:1].nbytes for tensor in tensors)
    for part in row_ranges(table.num_rows, row_bytes, max_bytes):
        keys = range(table.first_row + part.start, table.first_row + part.stop)
        yield read_rows(table, keys, with_states=with_states)


@torch.no_grad()
def write_rows(table: Table, chunk: RowChunk) -> None:
    """Copy a chunk's rows and states to their keys in ``table``, in place.

    Rows are converted to the table's dtype. States that the chunk leaves out stay as they are; its
    scores and steps of last uses have no place here, and are left out.

    Raises:
        IndexError: for a key that the table does not hold here; nothing is changed then.
        ValueError: for a state that the table has not, or another shape; likewise.
    """
    keys = chunk.keys - table.first_row
    if keys.numel() and not 0 <= int(keys.min()) <= int(keys.max()) < table.num_rows:
        raise IndexError(
            f"keys must be in {_held(table)}, which table {table.spec.name} holds here, got "
            f"{int(chunk.keys.min())} to {int(chunk.keys.max())}"
        )
    own = _states(table) if chunk.states else {}
    moves = [(chunk.rows, table.parameter.data, "rows")]
    for name, values in chunk.states.items():
        if name not in own:
            raise ValueError(f"states must be among {sorted(own)}, got {name!r}")
        moves.append((values, own[name], f"state {name!r}"))
    for values, tensor, what in moves:
        wanted = keys.numel(), *tensor.shape[1:]
        if tuple(values.shape) != wanted:
            raise ValueError(f"{what} must have shape {wanted}, got {tuple(values.shape)}")
    span = _as_slice(keys)
    for values, tensor, _ in moves:
        index = span if span is not None else keys.to(tensor.device)
        tensor[index] = values.to(tensor.device, tensor.dtype)


def _as_slice(keys: Tensor) -> slice | None:
    """Consecutive ascending keys as a slice, which needs no index on the table's device."""
    if not keys.numel():
        return slice(0, 0)
    first, last = int(keys[0]), int(keys[-1])
    is_range = last - first + 1 == keys.numel() and bool((keys.diff() == 1).all())
    return slice(first, last + 1) if is_range else None


def _states(table: Table) -> dict[str, Tensor]:
    """The table's optimizer state by name; empty without an optimizer of torchembed's."""
    if not table.group.holds_parameters():  # rows were replaced
        table.owner.form_groups()
    group = table.group
    if group.rule is None:
        return {}
    names = group.rule.state_names
    rows = [group.table_rows(state, table) for state in group.states]
    return dict(zip(names, rows, strict=True))


def _held(table: Table) -> str:
    return f"[{table.first_row}, {table.first_row + table.num_rows})"
