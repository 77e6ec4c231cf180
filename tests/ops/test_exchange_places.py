"""The places at which rows are stored, and which they exchange."""

import pytest
import torch
from torch import Tensor

from tests.support.row_cache_model import Move, row_moves
from torchembed.core.row_caches import REGION_BITS
from torchembed.ops.row_cache import RowMoves, exchange_places


def moves_of(moves: RowMoves) -> list[Move]:
    count = int(moves.count)
    return list(zip(*(rows[:count].tolist() for rows in moves[:3]), strict=True))


def test_worked_example(device: torch.device) -> None:
    place_of_row = torch.tensor([0, 2, 1], dtype=torch.int32, device=device)
    moves = exchange_places(place_of_row, row_moves(device, (5, 0, 1), (3, -1, 2)))
    assert moves_of(moves) == [(5, 2, 2), (3, -1, 1)]
    assert place_of_row.tolist() == [2, 0, 1]


def expected_moves(place_of: list[int], given: list[Move]) -> list[Move]:
    """The moves by places, which ``place_of`` follows."""
    moved = []
    for slot, written, read in sorted(given, key=lambda move: place_of[move[2]] >> REGION_BITS):
        place = place_of[read]
        moved.append((slot, place if written >= 0 else -1, place))
        if written >= 0:
            place_of[written], place_of[read] = place_of[read], place_of[written]
    return moved


@pytest.mark.parametrize(
    ("num_moves", "num_rows"),
    [(0, 5), (1, 7), (2, 9), (511, 1022), (512, 1030), (1500, 3007), (700, (5 << REGION_BITS) + 3)],
)
def test_rows_exchange_their_places(num_moves: int, num_rows: int, device: torch.device) -> None:
    """As a loop over the moves has it, one call after the other; within a region of places, and
    over several."""
    generator = torch.Generator().manual_seed(num_moves)

    def shuffled() -> Tensor:
        return torch.randperm(num_rows, generator=generator)

    place_of = shuffled().tolist()
    place_of_row = torch.tensor(place_of, dtype=torch.int32, device=device)
    for _ in range(3):
        slots, rows = shuffled()[:num_moves], shuffled()
        is_written = torch.rand(num_moves, generator=generator) < 0.7
        written = torch.where(is_written, rows[:num_moves], -1)
        columns = (slots, written, rows[num_moves : 2 * num_moves])
        given = list(zip(*(column.tolist() for column in columns), strict=True))
        moves = exchange_places(place_of_row, row_moves(device, *given))
        assert moves_of(moves) == expected_moves(place_of, given)
        assert place_of_row.tolist() == place_of


def test_moves_without_room(device: torch.device) -> None:
    nothing = row_moves(device)
    empty = RowMoves(
        nothing.slots[:0], nothing.written_rows[:0], nothing.read_rows[:0], nothing.count
    )
    place_of_row = torch.arange(4, dtype=torch.int32, device=device)
    assert moves_of(exchange_places(place_of_row, empty)) == []
    assert place_of_row.tolist() == [0, 1, 2, 3]
