"""Rows of a table with their optimizer state, in and out by key, some at a time."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.tables.dynamic.group_growth import make_room
from torchembed.tables.dynamic.hash_index import HashIndex
from torchembed.tables.rows.rows_by_id import held_ids, index_by_id, place_ids
from torchembed.tables.table import Table
from torchembed.tables.tiers import DiskGroup


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

    In a dynamic table they are numbers of rows, whatever ids these have.

    Raises:
        IndexError: if the table does not hold all of them here.
    """
    begin, end = keys.start - table.first_row, keys.stop - table.first_row
    if keys.step != 1 or not 0 <= begin <= end <= table.num_rows:
        raise IndexError(
            f"keys must be consecutive and in {_held(table)}, which table {table.spec.name} holds "
            f"here, got {keys}"
        )
    table.group.write_back()
    if isinstance(table.group, DiskGroup):
        return _read_lines(table, table.group, keys, with_states=with_states)
    states = table_states(table) if with_states else {}
    return RowChunk(
        torch.arange(keys.start, keys.stop),
        table.parameter.data[begin:end],
        {name: state[begin:end] for name, state in states.items()},
    )


def _read_lines(table: Table, group: DiskGroup, keys: range, *, with_states: bool) -> RowChunk:
    """:func:`read_rows` of a table on disk."""
    first = group.first_row_of(table) - table.first_row
    rows = torch.arange(keys.start + first, keys.stop + first)
    weight, *states = group.read_lines(rows, with_states=with_states)
    names = group.rule.state_names if with_states and group.rule is not None else ()
    found = dict(zip(names, states, strict=True))
    return RowChunk(torch.arange(keys.start, keys.stop), weight, found)


def row_chunks(table: Table, max_bytes: int, *, with_states: bool = True) -> Iterator[RowChunk]:
    """All rows that the table holds here, in ascending order of their keys; views, as
    :func:`read_rows` gives them. Of a dynamic table those that ids have, in the order of the rows,
    with their scores and last uses; copies, for which the host waits. A table without any gives one
    chunk of none.

    Args:
        max_bytes: of a chunk's rows and states; a chunk has at least one row.
    """
    tensors = [table.parameter.data, *(table_states(table).values() if with_states else ())]
    row_bytes, is_empty = sum(tensor[:1].nbytes for tensor in tensors), True
    for part in row_ranges(table.num_rows, row_bytes, max_bytes):
        keys = range(table.first_row + part.start, table.first_row + part.stop)
        chunk = read_rows(table, keys, with_states=with_states)
        index = index_by_id(table)
        if index is None:
            is_empty = False
            yield chunk
            continue
        rows, ids, scores, touched = held_ids(index, table, part)
        if len(rows):
            is_empty = False
            places = (rows - part.start).to(chunk.rows.device)
            states = {name: state[places] for name, state in chunk.states.items()}
            yield RowChunk(
                ids.cpu(), chunk.rows[places], states, scores=scores.cpu(), touched=touched.cpu()
            )
    if is_empty:
        none = read_rows(table, range(table.first_row, table.first_row), with_states=with_states)
        is_dynamic = index_by_id(table) is not None
        yield none._replace(scores=none.keys, touched=none.keys) if is_dynamic else none


@torch.no_grad()
def write_rows(table: Table, chunk: RowChunk) -> int:
    """Copy a chunk's rows and states to their keys in ``table``, in place.

    Rows are converted to the table's dtype. States that the chunk leaves out stay as they are; of
    ids that are new to a dynamic table they are the initial ones. Ids that it has not get rows, for
    which it grows where it can; where it is full those of the least scores; no batch may be under
    way then. A static table has no place for scores and last uses, which are left out.

    Returns:
        The number of ids that a dynamic table left out for others of greater scores: ids of the
        chunk that found no place, and ids that it held and that made room.

    Raises:
        IndexError: for a key that the table does not hold here; nothing is changed then.
        ValueError: for a state that the table has not, or another shape; likewise.
    """
    index = index_by_id(table)
    keys = chunk.keys if index is not None else _places_of(table, chunk.keys)
    moves = _moves(table, chunk)
    for values, tensor, what in moves:
        wanted = keys.numel(), *tensor.shape[1:]
        if tuple(values.shape) != wanted:
            raise ValueError(f"{what} must have shape {wanted}, got {tuple(values.shape)}")
    if index is not None:
        make_room(table, keys.to(table.group.device))
        table.group.write_back()
        num_left_out = _write_by_id(index, table, chunk, _moves(table, chunk))
        table.group.forget_cached()
        return num_left_out
    table.group.write_back()
    if isinstance(table.group, DiskGroup):
        _write_lines(table, table.group, keys, chunk)
        return 0
    span = _as_slice(keys)
    for values, tensor, _ in moves:
        places = span if span is not None else keys.to(tensor.device)
        tensor[places] = values.to(tensor.device, tensor.dtype)
    table.group.forget_cached()
    return 0


@torch.no_grad()
def write_numbered_rows(
    table: Table, numbers: Tensor, rows: Tensor, states: Mapping[str, Tensor]
) -> None:
    """Write rows and states in place of those that ``table`` holds under the numbers that its rows
    have here, whatever ids they are of.

    Args:
        numbers: int64 ``[n]``, from 0 on, on the CPU, each once.
        rows: ``[n, D]``, converted to the table's dtype.
        states: by name; those that are left out stay as they are.
    """
    group = table.group
    group.write_back()
    if isinstance(group, DiskGroup):
        _write_lines(table, group, numbers, RowChunk(numbers, rows, states))
        return
    own = table_states(table)
    for values, tensor in (
        (rows, table.parameter.data),
        *((values, own[name]) for name, values in states.items()),
    ):
        tensor[numbers.to(tensor.device)] = values.to(tensor.device, tensor.dtype)
    group.forget_cached()


def _moves(table: Table, chunk: RowChunk) -> list[tuple[Tensor, Tensor, str]]:
    """The copies to do for a chunk: of values to a tensor of the table, and its name."""
    own = table_states(table) if chunk.states else {}
    moves = [(chunk.rows, table.parameter.data, "rows")]
    for name, values in chunk.states.items():
        if name not in own:
            raise ValueError(f"states must be among {sorted(own)}, got {name!r}")
        moves.append((values, own[name], f"state {name!r}"))
    return moves


def _places_of(table: Table, keys: Tensor) -> Tensor:
    """The rows of the numbers ``keys [n]``, which ``table`` must hold here."""
    places = keys - table.first_row
    if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < table.num_rows:
        raise IndexError(
            f"keys must be in {_held(table)}, which table {table.spec.name} holds here, got "
            f"{int(keys.min())} to {int(keys.max())}"
        )
    return places


def _write_by_id(
    index: HashIndex, table: Table, chunk: RowChunk, moves: Sequence[tuple[Tensor, Tensor, str]]
) -> int:
    """:func:`write_rows` for a dynamic table; ``moves`` are values and where they go."""
    device = table.group.device
    on_device = [None if t is None else t.to(device) for t in (chunk.scores, chunk.touched)]
    rows, num_left_out = place_ids(index, table, chunk.keys.to(device), *on_device)
    is_placed = rows >= 0
    if isinstance(table.group, DiskGroup):
        kept = is_placed.cpu()
        states = {name: values[kept] for name, values in chunk.states.items()}
        placed = RowChunk(rows[is_placed].cpu(), chunk.rows[kept], states)
        _write_lines(table, table.group, placed.keys, placed)
        return num_left_out
    places, is_placed = rows[is_placed].to(table.parameter.device), is_placed.cpu()
    for values, tensor, _ in moves:
        tensor[places] = values[is_placed.to(values.device)].to(tensor.device, tensor.dtype)
    return num_left_out


def _write_lines(table: Table, group: DiskGroup, places: Tensor, chunk: RowChunk) -> None:
    """Write a chunk's rows and states to the rows ``places [n]`` of ``table``, which is on disk,
    after :meth:`~TableGroup.write_back`."""
    names = group.rule.state_names if group.rule is not None else ()
    values = [chunk.rows, *(chunk.states.get(name) for name in names)]
    group.write_lines(places + group.first_row_of(table), values)


def _as_slice(keys: Tensor) -> slice | None:
    """Consecutive ascending keys as a slice, which needs no index on the table's device."""
    if not keys.numel():
        return slice(0, 0)
    first, last = int(keys[0]), int(keys[-1])
    is_range = last - first + 1 == keys.numel() and bool((keys.diff() == 1).all())
    return slice(first, last + 1) if is_range else None


def table_states(table: Table) -> dict[str, Tensor]:
    """The table's optimizer state by name; empty without an optimizer of torchembed's."""
    if not table.group.holds_parameters():  # rows were replaced
        table.owner.form_groups()
    group = table.group
    if group.rule is None:
        return {}
    names = group.rule.state_names
    rows = [group.table_rows(state, table) for state in group.stored_states]
    return dict(zip(names, rows, strict=True))


def _held(table: Table) -> str:
    return f"[{table.first_row}, {table.first_row + table.num_rows})"
