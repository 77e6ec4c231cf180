"""Rows of dynamic tables, in and out by id."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.ops.hash_table import Policy, find_slots, insert_keys
from torchembed.tables.hash_index import HashIndex
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
    first_row, device = table.group.first_row_of(table), ids.device
    digests = index.contents(number)["digests"]
    tables = torch.full(ids.shape, number, dtype=torch.int32, device=device)
    num_ids = (digests > 0).sum() + (find_slots(state, ids, tables) < 0).sum()
    is_lru = state.scores is None
    touched = torch.ones_like(ids) if touched is None else touched.clamp_min(1)
    scores = touched if scores is None else scores
    if is_lru:
        scores = touched = scores.clamp_min(1)
    # By scores alone: as if no row had been used, and LRU's score were one of its own.
    unused = torch.zeros_like(state.touched)
    by_score = state._replace(
        touched=unused, scores=state.touched if state.scores is None else state.scores
    )
    one = torch.ones(1, dtype=torch.int64, device=device)
    assert by_score.scores is not None
    has_changed = True
    while has_changed:
        # Ids of one call take no places from each other, so those that were refused try again.
        placed = insert_keys(
            by_score,
            ids,
            tables,
            find_slots(by_score, ids, tables),
            policy=Policy.CALLER,
            epoch=one,
            released=torch.zeros_like(one),
            scores=scores,
        )
        table.group.initialize(NewRows(placed.new_slots, placed.keys, placed.tables))
        unused.zero_()
        is_new = placed.new_slots >= 0
        new_scores = by_score.scores[placed.new_slots.clamp_min(0)]
        is_better = ~placed.is_evicted | (new_scores > placed.evicted_scores)
        has_changed = bool((is_new & is_better).any())
    rows = find_slots(by_score, ids, tables)
    is_held = rows >= 0
    by_score.scores[rows[is_held]] = scores[is_held]
    state.touched[rows[is_held]] = touched[is_held]
    last = torch.cat([touched, index.clock.last]).amax().reshape(1)
    index.load_contents(number, {**index.contents(number), "clock": last})
    num_left_out = int(num_ids - (digests > 0).sum())
    return PlacedIds(torch.where(is_held, rows - first_row, -1), num_left_out)
