"""Lines of rows on disk that are rewritten: into another database, or where they are."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.tables.tiers.line_store import LineStore

ROWS_AT_ONCE = 1 << 16
"""The most rows that are copied between databases, or rewritten, at a time."""


class MovedRows(NamedTuple):
    """Consecutive rows that have other numbers in another group."""

    first: int
    """The number of the first one in the group that they come from."""
    first_here: int
    """Its number in the other one."""
    num_rows: int


def copy_lines(
    source: LineStore,
    target: LineStore,
    initial_state: float,
    *,
    with_states: bool = True,
    moved: Sequence[MovedRows] | None = None,
) -> None:
    """Copy lines to another database, converted to the dtypes there.

    Args:
        initial_state: every element of states that do not come along.
        with_states: whether the optimizer states do, which are of as many tensors there.
        moved: the rows that are copied; None for all, under their numbers.
    """
    if source.table is None:
        return
    for chunk in source.table.chunks(ROWS_AT_ONCE):
        parts = [(chunk.keys, chunk.lines)]
        if moved is not None:
            parts = []
            for first, first_here, num_rows in moved:
                is_moved = (chunk.keys >= first) & (chunk.keys < first + num_rows)
                parts.append((chunk.keys[is_moved] - first + first_here, chunk.lines[is_moved]))
        for rows, lines in parts:
            read = source.layout.empty(len(rows), None if with_states else 1)
            source.layout.unpack(lines, read, torch.arange(len(rows), device="cpu"))
            found = target.layout.empty(len(rows))
            for state in found[1:]:
                state.fill_(initial_state)
            for new, old in zip(found, read, strict=False):
                new.copy_(old)
            target.write(rows, target.layout.packed(found))


def change_lines(
    store: LineStore, rows: range, change: Callable[[Tensor, Sequence[Tensor]], None]
) -> None:
    """Let ``change`` change the weight and the states of all lines of ``rows``, in place, of the
    rows int64 ``[n]`` that it is given first."""
    if store.table is None:
        return
    for chunk in store.table.chunks(ROWS_AT_ONCE):
        is_changed = (chunk.keys >= rows.start) & (chunk.keys < rows.stop)
        numbers, lines = chunk.keys[is_changed], chunk.lines[is_changed]
        tensors = store.layout.empty(len(numbers))
        store.layout.unpack(lines, tensors, torch.arange(len(numbers), device="cpu"))
        change(numbers, tensors)
        store.write(numbers, store.layout.packed(tensors))
