"""Copies of neighbouring columns between matrices with as many rows."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.copies.rectangles import (
    RectangleCopies,
    RectangleCopy,
    copies_on,
    joined_moves,
)


class ColumnCopy(NamedTuple):
    """A copy of neighbouring columns from one matrix to another with as many rows."""

    source: int
    """First column in the matrix that is read."""
    width: int
    """Number of columns."""
    target: int
    """First column in the matrix that is written."""

    @property
    def back(self) -> "ColumnCopy":
        """The copy the other way."""
        return ColumnCopy(self.target, self.width, self.source)


def copies_of_parts(
    targets: tuple[int, ...],
    widths: tuple[int, ...],
    part_columns: tuple[int, ...],
    num_columns: int,
) -> tuple[tuple[ColumnCopy, ...], ...]:
    """The copies of each part to the joined matrix.

    Args:
        targets, widths: of the pieces of all parts, one part after the other.
        part_columns: number of columns of each part, which its pieces fill.
        num_columns: of the joined matrix, which pieces cover from the first of them on.

    Raises:
        ValueError: where pieces do not fill the parts, or do not cover the joined matrix.
    """
    # Compilers look through caches, and warn of them.
    find = _copies_of_parts if torch.compiler.is_compiling() else _kept_copies
    return find(targets, widths, part_columns, num_columns)


def _copies_of_parts(
    targets: tuple[int, ...],
    widths: tuple[int, ...],
    part_columns: tuple[int, ...],
    num_columns: int,
) -> tuple[tuple[ColumnCopy, ...], ...]:
    if len(targets) != len(widths):
        raise ValueError(
            f"targets must hold {len(widths)} numbers, one for each width, got {len(targets)}"
        )
    pieces = iter(zip(targets, widths, strict=True))
    copies = []
    for columns in part_columns:
        of_part, source = [], 0
        while source < columns:
            target, width = next(pieces, (0, 0))
            if width <= 0:
                break
            of_part.append(ColumnCopy(source, width, target))
            source += width
        if source != columns:
            raise ValueError(
                f"widths must be positive and fill the parts' {list(part_columns)} columns one "
                f"part after the other, got {list(widths)}"
            )
        copies.append(tuple(of_part))
    if next(pieces, None) is not None:
        raise ValueError(
            f"widths must end with the last of the parts' {list(part_columns)} columns, "
            f"got {list(widths)}"
        )
    ordered = sorted(zip(targets, widths, strict=True))
    begins = [target for target, _ in ordered]
    ends = [target + width for target, width in ordered]
    if not begins or begins[0] < 0 or [*begins[1:], num_columns] != ends:
        raise ValueError(
            f"targets must place each piece behind another one, the last at the end of the "
            f"{num_columns} columns, got {list(targets)} for widths {list(widths)}"
        )
    return tuple(copies)


_kept_copies = functools.lru_cache(maxsize=1024)(_copies_of_parts)


def copies_on_device(copies: Sequence[ColumnCopy], out: Tensor) -> RectangleCopies:
    """``copies`` to the contiguous ``out [B, columns]``, on its device."""
    num_rows, stride = out.shape
    moves = [
        RectangleCopy(0, num_rows, copy.width, 0, copy.source, copy.target, stride)
        for copy in copies
    ]
    return copies_on(out.device, tuple(joined_moves(moves)))
