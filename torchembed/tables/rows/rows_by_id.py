"""Rows of dynamic tables, in and out by id."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.ops.hash_table import Counter, find_slots, place_keys
from torchembed.tables.dynamic.hash_index import HashIndex
from torchembed.tables.row_index import NewRows
from torchembed.tables.table import Table


class HeldIds(NamedTuple):
    """The ids in some rows of a dynamic table."""

    rows: Tensor
    """int64 ``[n]``: their rows, of the table."""
    ids: Tensor
    """int64 ``[n]``."""
    scores: Tensor
    """int64 ``[n]``; under LRU the epochs of their last use."""
    touched: Tensor
    """int64 ``[n]``: the epochs of their last use."""


class PlacedIds(NamedTuple):
    """Ids that were given rows of a dynamic table, or not."""

    rows: Tensor
    """int64 ``[n]``; -1 for ids that found only greater scores in their buckets."""
    num_left_out: int
    """Ids that have no row, and ids that were there before and made room."""


def index_by_id(table: Table) -> HashIndex | None:
    """The index of a dynamic ``table``'s group; None for one whose ids are numbers of rows."""
    index = table.group.index
    return index if isinstance(index, HashIndex) else None


def held_ids(index: HashIndex, table: Table, part: range) -> HeldIds:
    """The ids in the rows ``part`` of ``table``, in the order of these. Waits for the device."""
    contents = index.contents(table.group.tables.index(table))
    rows = contents["digests"][part.start : part.stop].nonzero().flatten() + part.start
    touched = contents["touched"][rows]
    scores = contents["scores"][rows] if "scores" in contents else touched
    return HeldIds(rows, contents["ids"][rows], scores, touched)


@torch.no_grad()
def place_ids(
    index: HashIndex, table: Table, ids: Tensor, scores: Tensor | None, touched: Tensor | None
) -> PlacedIds:
    """Give rows of ``table`` to ``ids [n]``, all different.

    Where the table is full, the rows of the least scores make room. New rows get their initial
    values. No batch may be under way. Waits for the device.

    Args:
        scores: int64 ``[n]``; under LRU the epochs of the last use. None: the least.
        touched: int64 ``[n]``, the epochs of the last use, from 1 on; None: the first one.
    """
    number, state = table.group.tables.index(table), index.hash_tables
    tables = torch.full(ids.shape, number, dtype=torch.int32, device=ids.device)
    before = find_slots(state, ids, tables)
    digests = index.contents(number)["digests"]
    num_ids = (digests > 0).sum() + (before < 0).sum()
    touched = torch.ones_like(ids) if touched is None else touched.clamp_min(1)
    scores = touched if scores is None else scores
    if state.scores is None:
        scores = touched = scores.clamp_min(1)
    rows = place_keys(state, ids, tables, scores)
    is_held = rows >= 0
    state.touched[rows[is_held]] = touched[is_held]
    table.group.initialize(NewRows(torch.where(rows == before, -1, rows), ids, tables))
    index.follow_ids(torch.cat([touched, index.clock.last]).amax().reshape(1))
    table.note_moved_ids()
    num_left_out = int(num_ids - (digests > 0).sum())
    first_row = table.group.first_row_of(table)
    return PlacedIds(torch.where(is_held, rows - first_row, -1), num_left_out)


def clear_ids(table: Table) -> None:
    """Take all ids, what is known of them, and the counts of what admits others out of a dynamic
    ``table``, as if it were new. No batch may be under way."""
    contents = table.index_contents()
    none = {name: torch.zeros_like(tensor) for name, tensor in contents.items()}
    # Rows that hold no id keep the numbers that they may have.
    none["ids"] = torch.where(contents["digests"] > 0, 0, contents["ids"])
    # What was set stays: the score of batches to come, and where a sketch counts which id.
    none |= {n: contents[n].clone() for n in ("step_score", "sketch_keys") if n in contents}
    table.load_index_contents(none)


@torch.no_grad()
def erase_ids(table: Table, ids: Tensor) -> None:
    """Take ``ids``, int64 ``[n]``, and their rows out of a dynamic ``table``, also those that the
    last batch has used. No batch may be under way. Never waits for the device."""
    index = index_by_id(table)
    assert index is not None
    index.erase(table.group.tables.index(table), ids.to(index.clock.last.device), in_use=False)
    table.note_moved_ids()


def take_over(index: HashIndex, table: Table, clock: Tensor) -> None:
    """Count the ids that were placed in a dynamic ``table`` as inserted, and nothing else, and go
    on behind the epoch ``clock``, int64 ``[1]``. Never waits for the device."""
    counters = index.hash_tables.counters[table.group.tables.index(table)]
    size = counters[Counter.SIZE].clone()
    counters.zero_()
    counters[Counter.SIZE] = counters[Counter.INSERTED] = size
    index.follow_ids(clock.to(counters.device))
