"""Copies of neighbouring columns between matrices with as many rows."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchembed.core.rectangle_copies import RectangleCopies, RectangleCopy, copies_on


class ColumnCopy(NamedTuple):
    """A copy of neighbouring columns from one matrix to another with as many rows."""

    source: int
    """First column in the matrix that is read."""
    width: int
    """Number of columns."""
    target: int
    """First column in the matrix that is written."""


@functools.lru_cache(maxsize=1024)
def copies_of_parts(
    targets: tuple[int, ...], widths: tuple[int, ...], part_columns: tuple[int, ...]
) -> tuple[tuple[ColumnCopy, ...], ...]:
    """The copies of each part to the joined matrix.

    Args:
        targets, widths: of the pieces of all parts, one part after the other.
        part_columns: number of columns of each part, which its pieces fill.

    Raises:
        ValueError: where pieces do not fill the parts.
    """
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
    return tuple(copies)


def first_column(targets: list[int], widths: list[int], num_columns: int) -> int:
    """The first column that a piece is written to: none before it is.

    Raises:
        ValueError: where pieces do not cover the columns from there to ``num_columns`` once each.
    """
    ordered = sorted(zip(targets, widths, strict=True))
    ends = [target + width for target, width in ordered]
    begins = [target for target, _ in ordered]
    if not begins or begins[0] < 0 or [*begins[1:], num_columns] != ends:
        raise ValueError(
            f"targets must place each piece behind another one, the last at the end of the "
            f"{num_columns} columns, got {targets} for widths {widths}"
        )
    return begins[0]


def in_order(copies: tuple[tuple[ColumnCopy, ...], ...]) -> list[tuple[int, ColumnCopy]]:
    """The copies of all parts by their targets, each with the number of its part."""
    numbered = itertools.chain.from_iterable(
        ((part, copy) for copy in of_part) for part, of_part in enumerate(copies)
    )
    return sorted(numbered, key=lambda one: one[1].target)


def copies_on_device(copies: Sequence[ColumnCopy], out: Tensor) -> RectangleCopies:
    """``copies`` to the contiguous ``out [B, columns]``, on its device."""
    num_rows, stride = out.shape
    moves = [
        RectangleCopy(0, num_rows, copy.width, 0, copy.source, copy.target, stride)
        for copy in copies
    ]
    return copies_on(out.device, tuple(joined_moves(moves)))


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
