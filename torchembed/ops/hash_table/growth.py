"""Hash tables with more blocks, and where each row goes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.ops.hash_table.hashing import locate_keys
from torchembed.ops.hash_table.layout import HashTables, TableShape, geometry_of
from torchembed.ops.hash_table.sweeps import slot_ranges


class GrownTables(NamedTuple):
    """Result of :func:`grow`."""

    tables: HashTables
    new_slots: Tensor
    """int64 ``[S]``: the new slot of each old one that holds a key, and the new place of each spare
    one; -1 of free ones."""


def grow(
    hash_tables: HashTables, shapes: Sequence[TableShape], new_shapes: Sequence[TableShape]
) -> GrownTables:
    """Tables of more blocks with the keys of ``hash_tables``, in new tensors but for the counters.

    No key is evicted: a block becomes several, and a key keeps its bucket and its place there.
    Waits for the device.

    Args:
        hash_tables: unchanged.
        shapes: of the tables as they are.
        new_shapes: the same, but for ``num_blocks``, which may be doubled, and doubled again.

    Raises:
        ValueError: for shapes that differ in more.
    """
    for table, (shape, new_shape) in enumerate(zip(shapes, new_shapes, strict=True)):
        _check_growth(table, shape, new_shape)
    device = hash_tables.keys.device
    new_geometry = geometry_of(new_shapes, device)
    num_slots = sum(shape.num_rows for shape in new_shapes)
    new_slots = torch.full_like(hash_tables.keys, -1)
    for slots, new_range in zip(slot_ranges(shapes), slot_ranges(new_shapes), strict=True):
        held = slots.of(hash_tables.digests).nonzero().flatten()
        keys = slots.of(hash_tables.keys)[held]
        tables = torch.full(keys.shape, slots.table, dtype=torch.int32, device=device)
        blocks = locate_keys(keys, tables, new_geometry).blocks
        shape = new_shapes[slots.table]
        block_slots = shape.num_buckets * shape.num_slots
        first_slot = new_geometry[slots.table, 0]
        new_slots[slots.first_slot + held] = first_slot + blocks * block_slots + held % block_slots
        num_spare = shape.num_spare
        if num_spare:
            slots.of(new_slots)[-num_spare:] = (
                new_range.end - num_spare + torch.arange(num_spare, device=device)
            )
    is_held = new_slots >= 0

    def moved(state: Tensor) -> Tensor:
        new_state = state.new_zeros(num_slots)
        new_state[new_slots[is_held]] = state[is_held]
        return new_state

    tables = HashTables(
        digests=moved(hash_tables.digests),
        keys=moved(hash_tables.keys),
        touched=moved(hash_tables.touched),
        scores=None if hash_tables.scores is None else moved(hash_tables.scores),
        geometry=new_geometry,
        counters=hash_tables.counters,
    )
    return GrownTables(tables, new_slots)


def _check_growth(table: int, shape: TableShape, new_shape: TableShape) -> None:
    times = new_shape.num_blocks // max(shape.num_blocks, 1)
    is_doubled = times.bit_count() == 1 and shape.num_blocks * times == new_shape.num_blocks
    if shape != new_shape and (shape[1:] != new_shape[1:] or not is_doubled):
        raise ValueError(
            f"new_shapes[{table}] must have the blocks of {tuple(shape)}, doubled any number of "
            f"times, and the same buckets, slots and spare rows, got {tuple(new_shape)}"
        )
