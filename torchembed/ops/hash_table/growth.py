"""Hash tables with more blocks, and where each row goes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.ops.hash_table.hashing import locate_keys
from torchembed.ops.hash_table.layout import HashTables, TableShape, geometry_of, slot_ranges

_PIECE_BYTES = 2**23
"""Memory, about, of what is moved at a time, with the numbers that say from where to where."""
_NUMBER_BYTES = 64
"""Memory of those numbers, and of what they are computed from, for each row."""


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
    Beside the results it takes a few MiB of memory. Waits for the device.

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
        shape = new_shapes[slots.table]
        block_slots = shape.num_buckets * shape.num_slots
        first = 0
        for digests in slots.of(hash_tables.digests).split(_PIECE_BYTES // _NUMBER_BYTES):
            held = first + digests.nonzero().flatten()
            keys = slots.of(hash_tables.keys)[held]
            tables = torch.full(keys.shape, slots.table, dtype=torch.int32, device=device)
            blocks = locate_keys(keys, tables, new_geometry).blocks
            places = new_range.first_slot + blocks * block_slots + held % block_slots
            new_slots[slots.first_slot + held] = places
            first += len(digests)
        num_spare = shape.num_spare
        if num_spare:
            slots.of(new_slots)[-num_spare:] = (
                new_range.end - num_spare + torch.arange(num_spare, device=device)
            )

    def moved(state: Tensor) -> Tensor:
        return moved_rows(state, new_slots, num_slots)

    tables = HashTables(
        digests=moved(hash_tables.digests),
        keys=moved(hash_tables.keys),
        touched=moved(hash_tables.touched),
        scores=None if hash_tables.scores is None else moved(hash_tables.scores),
        geometry=new_geometry,
        counters=hash_tables.counters,
    )
    return GrownTables(tables, new_slots)


def moved_rows(tensor: Tensor, new_slots: Tensor, num_slots: int, *, initial: float = 0) -> Tensor:
    """``tensor [S, ...]`` with each row where it goes: ``[num_slots, ...]``, elsewhere ``initial``.

    Beside the result it takes a few MiB of memory. Waits for the device.

    Args:
        new_slots: int64 ``[S]``, as :func:`grow` gives them.
    """
    made = tensor.new_full((num_slots, *tensor.shape[1:]), initial)
    row_bytes = tensor.element_size() * tensor[:1].numel() + _NUMBER_BYTES
    num_rows = max(_PIECE_BYTES // row_bytes, 1)
    for rows, slots in zip(tensor.split(num_rows), new_slots.split(num_rows), strict=True):
        held = (slots >= 0).nonzero().flatten()
        made.index_copy_(0, slots[held], rows[held])
    return made


def _check_growth(table: int, shape: TableShape, new_shape: TableShape) -> None:
    times = new_shape.num_blocks // max(shape.num_blocks, 1)
    is_doubled = times.bit_count() == 1 and shape.num_blocks * times == new_shape.num_blocks
    if shape != new_shape and (shape[1:] != new_shape[1:] or not is_doubled):
        raise ValueError(
            f"new_shapes[{table}] must have the blocks of {tuple(shape)}, doubled any number of "
            f"times, and the same buckets, slots and spare rows, got {tuple(new_shape)}"
        )
