"""Hash tables as tensors, and their geometry."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.hash_tables import BUCKET_SLOTS, Counter, Policy

BLOCK_SLOTS = 4096
"""The most slots of a block, unless a table asks for larger ones: 32 buckets."""


class TableShape(NamedTuple):
    """Shape of one table: blocks of buckets of slots, and spare rows behind them."""

    num_blocks: int
    num_buckets: int
    """The buckets of a block."""
    num_slots: int
    """The slots of a bucket."""
    num_spare: int = 0
    """Places in the tensors behind the slots, for rows of the table that never hold a key."""

    @property
    def capacity(self) -> int:
        """Keys that the table can hold, one in each slot."""
        return self.num_blocks * self.num_buckets * self.num_slots

    @property
    def num_rows(self) -> int:
        """Places of the whole table, spare ones too, each of which is a row of its group."""
        return self.capacity + self.num_spare


class SlotRange(NamedTuple):
    """Slots of one table that follow one another."""

    table: int
    first_slot: int
    num_slots: int

    @property
    def end(self) -> int:
        """The slot behind the last one."""
        return self.first_slot + self.num_slots

    def pieces(self, num_slots: int) -> "Iterator[SlotRange]":
        """The range in parts of ``num_slots`` slots; the last one has what is left."""
        for begin in range(0, self.num_slots, num_slots):
            length = min(num_slots, self.num_slots - begin)
            yield SlotRange(self.table, self.first_slot + begin, length)

    def of(self, state: Tensor) -> Tensor:
        """The range's part ``[n]`` of ``state [S]``, in the same memory."""
        return state[self.first_slot : self.end]


def slot_ranges(shapes: Sequence[TableShape]) -> list[SlotRange]:
    """All slots of each table of a group, and the spare places behind them."""
    ranges, first_slot = [], 0
    for table, shape in enumerate(shapes):
        ranges.append(SlotRange(table, first_slot, shape.num_rows))
        first_slot += shape.num_rows
    return ranges


class HashTables(NamedTuple):
    """T hash tables in slots ``[0, S)`` of one group. Operations change the tensors in place."""

    digests: Tensor
    """uint8 ``[S]``: 0 where a slot is free, else 1 to 255, by the key's hash."""
    keys: Tensor
    """int64 ``[S]``: the key of each slot in use, 0 in free ones."""
    touched: Tensor
    """int64 ``[S]``: the admission epoch that used the row last, from 1 on; 0 in free slots."""
    scores: Tensor | None
    """int64 ``[S]``, 0 in free slots; None under LRU, whose score is ``touched``."""
    geometry: Tensor
    """int64 ``[T, 4]``: a table's first slot, its blocks, buckets a block and slots a bucket."""
    counters: Tensor
    """int64 ``[T, len(Counter)]``."""

    def of_slots(self) -> list[Tensor]:
        """The tensors ``[S]``, all of which are 0 in free slots."""
        tensors = self.digests, self.keys, self.touched, self.scores
        return [tensor for tensor in tensors if tensor is not None]


def table_shape(
    capacity: int, initial_capacity: int | None = None, *, block_slots: int | None = None
) -> TableShape:
    """The shape with which a table of ``capacity`` rows starts.

    Args:
        capacity: rows that it must be able to hold, fully grown; at least 1.
        initial_capacity: rows that it starts with, at least; None: all of them. It reaches
            ``capacity`` by doubling its blocks.
        block_slots: slots of a block, at most, :data:`BLOCK_SLOTS` by default. Larger blocks keep
            more of the keys that one table without blocks would keep.

    Raises:
        ValueError: for a capacity below 1, or an initial one outside ``[1, capacity]``.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1 row, got {capacity}")
    block_slots = BLOCK_SLOTS if block_slots is None else block_slots
    if initial_capacity is None:
        initial_capacity = capacity
    if not 1 <= initial_capacity <= capacity:
        raise ValueError(
            f"initial_capacity must be in [1, {capacity}], the capacity, got {initial_capacity}"
        )
    full_blocks = -(-capacity // block_slots)
    num_blocks, num_doublings = full_blocks, 0
    while num_blocks > 1 and -(-num_blocks // 2) * block_slots >= initial_capacity:
        num_blocks, num_doublings = -(-num_blocks // 2), num_doublings + 1
    full_blocks = num_blocks << num_doublings
    num_buckets = -(-capacity // (full_blocks * BUCKET_SLOTS))
    num_slots = -(-capacity // (full_blocks * num_buckets))
    return TableShape(num_blocks, num_buckets, num_slots)


def growing_shapes(capacity: int) -> list[TableShape]:
    """The shapes of a table that grows to ``capacity`` rows, or a few more, from the smallest one
    on; each has twice the blocks of the one before. The rows of the last one, as a capacity, give
    the same shapes.

    Raises:
        ValueError: for a capacity below 1.
    """
    shapes = [table_shape(capacity, 1)]
    while shapes[-1].num_rows < capacity:
        shapes.append(shapes[-1]._replace(num_blocks=2 * shapes[-1].num_blocks))
    return shapes


def geometry_of(shapes: Sequence[TableShape], device: torch.device | None = None) -> Tensor:
    """``HashTables.geometry`` of tables whose slots follow one another: int64 ``[T, 4]``."""
    rows = [
        [slots.first_slot, shape.num_blocks, shape.num_buckets, shape.num_slots]
        for slots, shape in zip(slot_ranges(shapes), shapes, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(rows), 4)


def empty_hash_tables(
    shapes: Sequence[TableShape], policy: Policy, device: torch.device | None = None
) -> HashTables:
    """Tables of ``shapes`` that hold no key."""
    num_slots = sum(shape.num_rows for shape in shapes)

    def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return HashTables(
        digests=zeros(num_slots, dtype=torch.uint8),
        keys=zeros(num_slots),
        touched=zeros(num_slots),
        scores=None if policy is Policy.LRU else zeros(num_slots),
        geometry=geometry_of(shapes, device),
        counters=zeros(len(shapes), len(Counter)),
    )
