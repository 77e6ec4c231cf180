"""Admission by exact counts: an id gets a row when it has occurred often enough."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from torchembed.ops.hash_table import (
    HashTables,
    Policy,
    empty_hash_tables,
    erase_keys,
    find_slots,
    insert_keys,
    place_keys,
    slot_ranges,
    table_shape,
    touch_slots,
)
from torchembed.tables.dynamic.admission_filters import INT32_MAX, ChosenIds, check_count
from torchembed.tables.row_index import IndexedTable, max_rows_of

# Ids that have no row yet lie in hash tables whose scores are pairs of the batch that they came in
# last, in the higher 32 bits, and their count: where there is no room, that of the longest unseen
# goes. By the count alone new ids would not come in while the others have greater ones.
_POLICY = Policy.EPOCH_LFU
_COUNT_MASK = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class MinimumCount:
    """Admits an id to a dynamic table when it has occurred ``threshold`` times, by an exact count.

    An id that gets a row gives up its count, and is counted from 0 again once it was evicted. If
    more than ``capacity`` ids have no row, the counts of those that have not come for longest are
    forgotten. So a count may be too small, and is never too large. Ids of one batch do not make
    room for one another, so ``capacity`` must exceed the number of new ids in a batch.

    A count takes 25 bytes on the device.
    """

    threshold: int
    """Occurrences in training batches until an id gets a row; each in a batch counts."""
    capacity: int | None = dataclasses.field(default=None, kw_only=True)
    """The least number of ids in each table whose counts are kept; None for the table's
    capacity."""

    def __post_init__(self) -> None:
        check_count("threshold", self.threshold, INT32_MAX)
        if self.capacity is not None:
            check_count("capacity", self.capacity, 2**40)

    def bytes_for(self, num_rows: int) -> int:
        """Bytes of the counts of a table of ``num_rows``."""
        return 25 * table_shape(self.capacity or num_rows).num_rows

    def build(self, tables: Sequence[IndexedTable], device: torch.device) -> "MinimumCountFilter":
        """The filter, without counts, of the tables of a group."""
        return MinimumCountFilter(self, tables, device)


class MinimumCountFilter:
    """The :class:`MinimumCount` of each table of a group.

    Args:
        config: the same for all tables.
        tables: of the group, in order.
        device: where ids come.

    Attributes:
        counts: hash tables of the ids that have no row; the lower 32 bits of a score are the count.
    """

    def __init__(
        self, config: MinimumCount, tables: Sequence[IndexedTable], device: torch.device
    ) -> None:
        self._threshold = config.threshold
        shapes = [table_shape(config.capacity or max_rows_of(table)) for table in tables]
        self._ranges = slot_ranges(shapes)
        self.counts: HashTables = empty_hash_tables(shapes, _POLICY, device)

    def admit(self, ids: Tensor, tables: Tensor, is_new: Tensor, epoch: Tensor) -> ChosenIds:
        """The ids whose counts have reached the threshold."""
        tables = torch.where(is_new, tables, -1)
        number = epoch.clamp_max(INT32_MAX)
        slots = find_slots(self.counts, ids, tables)
        touch_slots(self.counts, slots, tables, policy=_POLICY, epoch=epoch, epoch_number=number)
        slots = insert_keys(
            self.counts,
            ids,
            tables,
            slots,
            policy=_POLICY,
            epoch=epoch,
            released=epoch - 1,
            epoch_number=number,
        ).slots
        assert self.counts.scores is not None
        counts = self.counts.scores[slots.clamp_min(0)] & _COUNT_MASK
        return ChosenIds(is_new & (slots >= 0) & (counts >= self._threshold), counts)

    def forget(self, ids: Tensor, tables: Tensor, epoch: Tensor) -> None:
        """Erase the counts of ids that got rows; one that was refused keeps its count."""
        erase_keys(self.counts, ids, tables, released=epoch)

    def contents(self, table: int) -> dict[str, Tensor]:
        """Views of ``n`` counts: ``counted_ids`` int64 ``[n]``; ``counted_digests`` uint8
        ``[n]``, 0 of free entries; ``counts`` int64 ``[n]``, with the epoch of the last occurrence
        in the higher 32 bits; ``counted_epochs`` int64 ``[n]``, and ``count_counters`` int64."""
        state, slots = self.counts, self._ranges[table]
        assert state.scores is not None
        return {
            "counted_ids": slots.of(state.keys),
            "counted_digests": slots.of(state.digests),
            "counts": slots.of(state.scores),
            "counted_epochs": slots.of(state.touched),
            "count_counters": state.counters[table],
        }

    def load_contents(self, table: int, contents: Mapping[str, Tensor]) -> None:
        own = self.contents(table)
        for name, tensor in own.items():
            if contents[name].shape != tensor.shape:
                raise ValueError(
                    f"{name} must have shape {tuple(tensor.shape)}, as the capacity of the table's "
                    f"MinimumCount says, got {tuple(contents[name].shape)}; build the table with "
                    "the one that it was saved with"
                )
        for name, tensor in own.items():
            tensor.copy_(contents[name])

    def merge(
        self, table: int, contents: Mapping[str, Tensor], is_here: Callable[[Tensor], Tensor]
    ) -> None:
        """Take the counts over of the ids that are here; where there is no room, those of the ids
        that came last."""
        device = self.counts.keys.device
        is_held = contents["counted_digests"].to(device) > 0
        is_held &= is_here(contents["counted_ids"].to(device))
        ids, counts, epochs = (
            contents[name].to(device)[is_held]
            for name in ("counted_ids", "counts", "counted_epochs")
        )
        tables = torch.full(ids.shape, table, dtype=torch.int32, device=device)
        slots = place_keys(self.counts, ids, tables, counts)
        self.counts.touched[slots[slots >= 0]] = epochs[slots >= 0]
