"""Copies of rectangles between matrices, and tensors of them on a device."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.types import COPY_FIELDS


class RectangleCopy(NamedTuple):
    """Copy of a rectangle of a matrix: element ``(row + i, column + j)`` goes to element
    ``target + i * stride + j`` of the memory of ``rank``.

    A tuple, since lookups make some for each step on the host and find their tensor by them.
    """

    rank: int
    """Rank whose memory is written; 0 for a copy within one memory."""
    num_rows: int
    num_columns: int
    row: int
    column: int
    target: int
    """Element of the memory that gets the rectangle's first one."""
    stride: int
    """Elements of the memory from one row of the rectangle to the next."""


def joined_moves(moves: Sequence[RectangleCopy]) -> list[RectangleCopy]:
    """``moves`` of rows of one matrix to another one, in which neighbours are one."""
    joined: list[RectangleCopy] = []
    for one in moves:
        if joined:
            before = joined[-1]
            ends = before.column + before.num_columns, before.target + before.num_columns
            if ends == (one.column, one.target):
                joined[-1] = one._replace(
                    num_columns=before.num_columns + one.num_columns,
                    column=before.column,
                    target=before.target,
                )
                continue
        joined.append(one)
    return joined


class RectangleCopies:
    """Copies of rectangles as one tensor on a device, with the bounds that kernels need.

    Args:
        copies: those without rows or columns copy nothing.
        device: where kernels read them.
    """

    def __init__(self, copies: Sequence[RectangleCopy], device: torch.device) -> None:
        self.max_rows = max((copy.num_rows for copy in copies), default=0)
        self.max_columns = max((copy.num_columns for copy in copies), default=0)
        vector = 8
        while any(
            number % vector
            for copy in copies
            for number in (copy.num_columns, copy.column, copy.target, copy.stride)
        ):
            vector //= 2
        self.vector = vector
        """Elements that a thread reads and writes at once: columns and targets are multiples."""
        numbers = torch.tensor(copies, dtype=torch.int64, device="cpu").reshape(-1, COPY_FIELDS)
        self.numbers = numbers.to(device)
        """int64 ``[M, 7]``, the fields of each copy."""

    def on_device(self) -> Tensor:
        """The numbers, for a kernel; kept for good where a CUDA graph captures it."""
        if self.numbers.is_cuda and torch.cuda.is_current_stream_capturing():
            _captured.setdefault(self.numbers.data_ptr(), self.numbers)
        return self.numbers


@functools.lru_cache(maxsize=1024)
def copies_on(device: torch.device, copies: tuple[RectangleCopy, ...]) -> RectangleCopies:
    """``copies`` on ``device``; the host waits for it where they are seen for the first time."""
    return RectangleCopies(copies, device)


_captured: dict[int, Tensor] = {}
"""Tensors that a CUDA graph has captured, by address: the graph may be replayed at any later time,
when the cache has long dropped them."""
