"""Where rows of a group lie in host memory, and how they come back to their own places."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.row_cache_model import row_moves
from torchembed.ops.row_cache import move_rows
from torchembed.tables.tiers import row_places
from torchembed.tables.tiers.row_places import MAX_ROWS, RowPlaces

CPU = torch.device("cpu")


def lines_of(rows: Tensor) -> list[Tensor]:
    """A weight and a state that tell the row."""
    return [rows.float()[:, None].repeat(1, 3), 100 + rows.float()]


def test_each_row_is_at_its_own_place_at_first() -> None:
    places = RowPlaces(4, CPU)
    assert places.find(torch.tensor([3, -1, 0])).tolist() == [3, -1, 0]
    stored = lines_of(torch.arange(4))
    places.restore(stored)
    assert torch.equal(stored[1], 100 + torch.arange(4.0))


def test_a_row_that_makes_room_goes_where_the_other_one_was() -> None:
    places, stored = RowPlaces(5, CPU), lines_of(torch.arange(5))
    cached = lines_of(torch.tensor([0, 4]))
    moves = places.exchanged(row_moves(CPU, (1, 4, 2), (0, 0, 1)))
    move_rows(moves, cached, stored)
    assert cached[1].tolist() == [101, 102]
    assert stored[1].tolist() == [100, 100, 104, 103, 104]
    assert places.find(torch.arange(5)).tolist() == [1, 0, 4, 3, 2]
    # What is at the places of cached rows says nothing until they are written.
    stored[0][4], stored[1][4] = 2, 102
    stored[0][0], stored[1][0] = 1, 101
    places.restore(stored)
    for tensor, expected in zip(stored, lines_of(torch.arange(5)), strict=True):
        assert torch.equal(tensor, expected)
    assert places.find(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(12)), st.integers(1, 13))
def test_every_order_is_restored(order: list[int], rows_at_once: int) -> None:
    """In pieces of every size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_places, "_ROWS_AT_ONCE", rows_at_once)
        place_of_row = torch.tensor(order)
        stored = lines_of(place_of_row.argsort())
        places = RowPlaces(12, CPU)
        places._place_of_row.copy_(place_of_row)
        places.restore(stored)
    for tensor, expected in zip(stored, lines_of(torch.arange(12)), strict=True):
        assert torch.equal(tensor, expected)
    assert places.find(torch.arange(12)).tolist() == list(range(12))


def test_too_many_rows_are_named() -> None:
    with pytest.raises(
        ValueError, match=rf"fewer than {MAX_ROWS} rows together, got {MAX_ROWS}; shard them, or "
    ):
        RowPlaces(MAX_ROWS, torch.device("meta"))
