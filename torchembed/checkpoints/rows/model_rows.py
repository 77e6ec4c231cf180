"""Rows by key out of a model and into one, whose tables may be spread over ranks."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from torchembed.checkpoints.rows.row_source import CHUNK_BYTES
from torchembed.core import ranks
from torchembed.core.ranks.collective_errors import raise_on_all_ranks
from torchembed.modules.table_module import TableModule
from torchembed.sharding.transport.global_rows import are_here
from torchembed.tables import RowChunk, Table, row_chunks, table_of, table_states, write_rows


def model_rows(
    model: nn.Module, name: str, *, chunk_bytes: int = CHUNK_BYTES, with_states: bool = True
) -> Iterator[RowChunk]:
    """The rows of a table of ``model`` that this rank is to export, so that all ranks together give
    each row once; what :func:`export_rows` takes.

    Of a table whose rows or ids are divided each rank gives its own, of one that all ranks hold the
    first rank gives all, and ranks that hold none give none. Collective, but for the iteration.

    Args:
        name: of the table's weight in ``state_dict``.
        chunk_bytes: of a chunk's rows and states, at most, unless a row is larger.
        with_states: with optimizer state too.

    Raises:
        ValueError: for a name that no table has on any rank, or a table whose columns are divided.
        RuntimeError: for the latter, on ranks that hold none of them.
    """
    table = _table(model, name, f"give the rows of {name}")

    def check() -> None:
        if table is not None and table.num_columns < table.spec.dim:
            raise ValueError(
                f"table {name} must not have its columns divided over ranks, since a row would be "
                "in several parts; save a checkpoint, and load it under another placement"
            )

    raise_on_all_ranks(check, f"give the rows of {name}")
    if table is None or not (table.is_sharded or ranks.rank() == 0):
        return iter(())
    return row_chunks(table, chunk_bytes, with_states=with_states)


@torch.no_grad()
def load_rows(model: nn.Module, name: str, source: Iterable[RowChunk]) -> int:
    """Write rows by key into a table of ``model``, in place; other rows stay as they are.

    Each rank reads all chunks and takes the rows that belong to it, of the columns that it holds.
    States that chunks leave out stay as they are, or are the initial ones for ids that are new to a
    dynamic table. No batch may be under way. Collective: every rank calls it with the same source.

    Args:
        name: of the table's weight in ``state_dict``.
        source: a :class:`RowSource`, or a list of chunks: what may be iterated twice. Scores of
            other systems must mean what those of the table's policy do.

    Returns:
        How many ids found no row, on all ranks together, since those of greater scores fill a
        dynamic table.

    Raises:
        TypeError: for an iterator, which can be iterated once.
        ValueError: for a name that no table has on any rank, rows of another length, states that
            the table has not, or a key outside a static table; nothing is changed then.
        RuntimeError: for the same, on ranks that hold none of the table.
    """
    what = f"load rows into {name}"
    table = _table(model, name, what)

    def check() -> None:
        if iter(source) is source:
            raise TypeError(
                f"source must be a RowSource or a list of chunks, which can be iterated twice, got "
                f"{type(source).__name__}"
            )
        if table is not None:
            for chunk in source:
                _check_chunk(name, table, chunk)

    raise_on_all_ranks(check, what)

    def write() -> int:
        if table is None:
            return 0
        return sum(write_rows(table, _part_of(table, chunk)) for chunk in source)

    num_left_out = raise_on_all_ranks(write, what)
    for module in model.modules():
        if isinstance(module, TableModule):
            module.note_moved_ids()
    # The ranks of columns all leave out the same.
    counts = table is not None and not table.first_column
    return sum(ranks.gather_objects(num_left_out if counts else 0))


def _table(model: nn.Module, name: str, what: str) -> Table | None:
    """The table of a weight, None where only other ranks hold it. Collective."""
    tables = {n: t for n, p in model.named_parameters() if (t := table_of(p)) is not None}
    known = sorted({n for names in ranks.gather_objects(list(tables)) for n in names})
    if name not in known:
        raise ValueError(f"name must be that of a table's weight, {known}, to {what}; got {name!r}")
    return tables.get(name)


def _check_chunk(name: str, table: Table, chunk: RowChunk) -> None:
    """Raise ``ValueError`` for a chunk that is not of the table of this ``name``."""
    states, num_keys = table_states(table), len(chunk.keys)
    for what, numbers in (
        ("keys", chunk.keys),
        ("scores", chunk.scores),
        ("touched", chunk.touched),
    ):
        if numbers is not None and numbers.dtype is not torch.int64:
            raise ValueError(
                f"{what} of source must be int64 to load {name}, got {numbers.dtype}; call .long()"
            )
    unknown = set(chunk.states) - set(states)
    if unknown:
        raise ValueError(
            f"states of source must be among those of {name}, {sorted(states)}, got "
            f"{sorted(unknown)}; leave them out, or make the optimizer that has them"
        )
    for what, values, dims in (
        ("rows", chunk.rows, 2),
        *((f"state {n!r}", s, states[n].dim()) for n, s in chunk.states.items()),
    ):
        wanted = (num_keys, table.spec.dim)[:dims]
        if tuple(values.shape) != wanted:
            raise ValueError(
                f"{what} of source must have shape {wanted} as {name} has, got "
                f"{tuple(values.shape)}"
            )
    if table.spec.num_ids is not None and num_keys:
        least, greatest = int(chunk.keys.min()), int(chunk.keys.max())
        if least < 0 or greatest >= table.spec.num_rows:
            raise ValueError(
                f"keys of source must be in [0, {table.spec.num_rows}), the rows of {name}, got "
                f"{least if least < 0 else greatest}"
            )


def _part_of(table: Table, chunk: RowChunk) -> RowChunk:
    """The rows of a chunk of whole rows that belong here, and of these the columns."""
    is_here = are_here(table, chunk.keys)
    columns = slice(table.first_column, table.first_column + table.num_columns)

    def part(values: Tensor) -> Tensor:
        own = values[is_here]
        return own[:, columns] if own.dim() > 1 else own

    return RowChunk(
        chunk.keys[is_here],
        part(chunk.rows),
        {name: part(state) for name, state in chunk.states.items()},
        None if chunk.scores is None else chunk.scores[is_here],
        None if chunk.touched is None else chunk.touched[is_here],
    )
