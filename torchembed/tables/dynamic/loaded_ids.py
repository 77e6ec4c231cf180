"""Checks of ids that are loaded, which lookups believe where they lie."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torchembed.core.stand_ins import is_stand_in
from torchembed.ops.hash_table import (
    HashTables,
    TableShape,
    find_slots,
    geometry_of,
    key_digests,
)
from torchembed.tables.dynamic.hashed_rows import numbers_of_shared_rows

_NUM_AT_ONCE = 1 << 20
"""Ids that are hashed at once, so that large tables take little memory."""


def wrong_digests(contents: Mapping[str, Tensor]) -> list[str]:
    """The names of those digests in ``index_contents`` of a table that are not their ids': each is
    that of the id in its place, or 0 where there is none. Waits for their device.

    Args:
        contents: by name; ``digests`` are those of ``ids``, and ``counted_digests`` of
            ``counted_ids``. None are wrong of tensors without elements of their own.
    """
    pairs = [("ids", "digests"), ("counted_ids", "counted_digests")]
    return [
        name
        for of_ids, name in pairs
        if name in contents and not _belong_together(contents[of_ids], contents[name])
    ]


def _belong_together(ids: Tensor, digests: Tensor) -> bool:
    if ids.is_meta or is_stand_in(ids):
        return True
    chunks = zip(ids.split(_NUM_AT_ONCE), digests.split(_NUM_AT_ONCE), strict=True)
    return all(
        bool(((held == 0) | (held == key_digests(of.to(held.device)))).all()) for of, held in chunks
    )


def count_misplaced_rows(
    contents: Mapping[str, Tensor], shape: TableShape, are_here: Callable[[Tensor], Tensor]
) -> int:
    """The rows that do not hold what a table of ``shape`` would have there: an id that lookups do
    not find in its place, or that is another rank's; or the number of another shared row, or of one
    where there is none. Waits for the device of the digests.

    Args:
        contents: ``index_contents`` of the table. No row is wrong of tensors without elements of
            their own.
        are_here: says, bool ``[n]``, which of ids int64 ``[n]`` are for this part of the table.
    """
    ids, digests = contents["ids"], contents["digests"].contiguous()
    if ids.is_meta or is_stand_in(ids):
        return 0
    ids = ids.to(digests.device).contiguous()
    counters, num_wrong = contents["counters"][None], torch.zeros_like(ids[:1])
    geometry = geometry_of([shape], ids.device)
    hash_tables = HashTables(digests, ids, contents["touched"], None, geometry, counters)
    slots = torch.arange(shape.capacity, device=ids.device)
    for rows in slots.split(_NUM_AT_ONCE):
        keys, is_held = ids[rows], digests[rows] > 0
        found = find_slots(hash_tables, keys, torch.zeros_like(rows, dtype=torch.int32))
        is_right = torch.where(is_held, (found == rows) & are_here(keys), keys == 0)
        num_wrong += (~is_right).sum()
    shared, is_held = ids[shape.capacity :], digests[shape.capacity :] > 0
    is_right = ~is_held & (shared == numbers_of_shared_rows(shape.num_spare, ids.device))
    return int(num_wrong + (~is_right).sum())
