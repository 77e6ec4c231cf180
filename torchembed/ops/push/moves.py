"""Rectangles to move, as numbers on a device."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.types import MOVE_FIELDS

Move = tuple[int, int, int, int, int, int, int]
"""A rectangle, as ``(rank, num_rows, num_columns, row, column, target, stride)``: element
``(row + i, column + j)`` of a matrix goes to element ``target + i * stride + j`` of the memory of
``rank``. Moves within one memory have rank 0."""


class Moves:
    """Rectangles to move, on a device.

    Args:
        moves: one without rows or columns moves nothing.
        device: where kernels read them.
    """

    def __init__(self, moves: Sequence[Move], device: torch.device) -> None:
        self.most_rows = max((move[1] for move in moves), default=0)
        self.most_columns = max((move[2] for move in moves), default=0)
        vector = 8
        while any(move[field] % vector for move in moves for field in (2, 4, 5, 6)):
            vector //= 2
        self.vector = vector
        """Elements that columns and targets are multiples of: a thread takes so many at once."""
        numbers = torch.tensor(moves, dtype=torch.int64, device="cpu").reshape(-1, MOVE_FIELDS)
        self.numbers = numbers.to(device)
        """int64 ``[M, 7]``."""

    def on_device(self) -> Tensor:
        """The numbers, for a kernel; kept for good where a CUDA graph captures it."""
        if self.numbers.is_cuda and torch.cuda.is_current_stream_capturing():
            _captured.setdefault(self.numbers.data_ptr(), self.numbers)
        return self.numbers


@functools.lru_cache(maxsize=1024)
def moves_on(device: torch.device, moves: tuple[Move, ...]) -> Moves:
    """``moves`` on ``device``; the host waits for it where they are seen for the first time."""
    return Moves(moves, device)


_captured: dict[int, Tensor] = {}
"""By address, what a CUDA graph has captured: a replay reads it however long ago that was."""
