"""The cached rows of tables of one form, on one device."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.types import Pooling
from torchembed.ops.hash_table import (
    HashTables,
    Policy,
    empty_hash_tables,
    erase_keys,
    find_slots,
    insert_keys,
    slot_ranges,
    table_shape,
    touch_slots,
)
from torchembed.ops.pooled_lookup import pooled_lookup
from torchembed.ops.sequence_lookup import sequence_lookup
from torchembed.serving.levels.line_memory import DeviceLines, HostLines
from torchembed.serving.levels.served_table import ServedTable


class FoundSlots(NamedTuple):
    """Where the rows of some ids are."""

    slots: Tensor
    """int64 ``[L]``: the slot of each id, that of its table's default row where it has none, and -1
    where there is no id."""
    is_missing: Tensor
    """bool ``[L]``: True for ids without a row here."""


class LoadedCounts(NamedTuple):
    """Counts of rows that could not be loaded."""

    num_changed: int
    """Those whose keys had another row; nothing was loaded then."""
    num_refused: int
    """Those for which there was no room."""


class Bags(NamedTuple):
    """How :func:`pooled_lookup` pools the rows of L ids: its arguments of these names."""

    offsets: Tensor | None
    hotness: tuple[int, ...] | None
    batch_size: int
    num_features: int
    per_id_weights: Tensor | None
    pooling: Pooling

    def to(self, device: torch.device) -> "Bags":
        """The same bags on ``device``."""
        return self._replace(
            offsets=None if self.offsets is None else self.offsets.to(device),
            per_id_weights=None if self.per_id_weights is None else self.per_id_weights.to(device),
        )


class CacheGroup:
    """Rows of T tables of one dim and format in one array on one device, found through one hash
    table of all of them, so that a lookup in many tables is one call.

    Each table has a row behind its slots, which holds its default and answers ids that have none.
    Shapes never depend on what tensors hold, and no method waits for a GPU unless it says so.
    :class:`CacheAccess` says who may call which when.

    Args:
        tables: of one dim and format.
        num_rows: rows that the cache has room for, of each table. A table's row may be evicted
            before all its room is taken, since a key has 256 slots to choose from.
        device: of all tensors.
        num_device_rows: rows that are on the device beside memory of the host, which then has all
            of them; None for all rows on the device.
    """

    def __init__(
        self,
        tables: Sequence[ServedTable],
        num_rows: Sequence[int],
        device: torch.device,
        num_device_rows: int | None = None,
    ) -> None:
        self.dim, self.row_format = tables[0].dim, tables[0].row_format
        self.device = device
        shapes = [table_shape(count)._replace(num_spare=1) for count in num_rows]
        self.capacities = [shape.capacity for shape in shapes]
        self.ranges = slot_ranges(shapes)
        self.hash_tables: HashTables = empty_hash_tables(shapes, Policy.LRU, device)
        num_slots = self.ranges[-1].end
        self.num_slots = num_slots
        """Slots of all tables, default rows among them."""
        line_bytes = self.row_format.line_bytes(self.dim)
        self.memory: DeviceLines | HostLines
        if num_device_rows is None:
            self.memory = DeviceLines(num_slots, line_bytes, device)
        else:
            self.memory = HostLines(num_slots, line_bytes, num_device_rows, device)
        default_slots = [slots.end - 1 for slots in self.ranges]
        # One more, of table -1, which index -1 reads.
        self._default_slots = torch.tensor([*default_slots, -1], device=device)
        defaults = torch.tensor([table.default for table in tables], device=device)
        default_rows = defaults[:, None].expand(-1, self.dim)
        self.memory.write(self._default_slots[:-1], self.row_format.encode(default_rows))
        self.table_of_slot = torch.cat(
            [
                torch.full((slots.num_slots,), table, dtype=torch.int32, device=device)
                for table, slots in enumerate(self.ranges)
            ]
        )
        """int32 ``[S]``."""
        self.epoch = torch.zeros(1, dtype=torch.int64, device=device)
        """The number of the last lookup or insertion, by which rows are the longest unused."""

        self._next_slot = 0

    def find(self, keys: Tensor, tables: Tensor, *, is_use: bool = True) -> FoundSlots:
        """Find the rows of ``keys``, int64 ``[L]``, of ``tables``, int32 ``[L]``: -1 where there is
        no id. Where it ``is_use`` they are recent from then on, and counted as hits and misses."""
        slots = find_slots(self.hash_tables, keys, tables)
        if is_use:
            self.epoch.add_(1)
            touch_slots(self.hash_tables, slots, tables, policy=Policy.LRU, epoch=self.epoch)
        is_missing = (slots < 0) & (tables >= 0)
        slots = torch.where(slots < 0, self._default_slots[tables.long()], slots)
        return FoundSlots(slots, is_missing)

    def read(self, slots: Tensor) -> Tensor:
        """The rows in ``slots``, int64 ``[L]``: float32 ``[L, dim]``; zeros for -1."""
        weight = self._weight()
        if weight is not None:
            return sequence_lookup(weight, slots, output_dtype=torch.float32)
        rows = self.row_format.decode(self.memory.read(slots), self.dim)
        return rows.masked_fill((slots < 0)[:, None], 0.0)

    def pool(self, slots: Tensor, bags: Bags) -> Tensor:
        """Pool the rows in ``slots``, as :func:`pooled_lookup`: float32
        ``[B, F, dim]``. Rows with a scale, and those in memory of the host, are read first."""
        weight, rows = self._weight(), slots
        if weight is None:
            weight = self.read(slots)
            rows = torch.arange(slots.numel(), device=slots.device)
        return pooled_lookup(
            weight,
            rows,
            **bags._asdict(),
            output_dtype=torch.float32,
        )

    def insert(self, keys: Tensor, tables: Tensor, lines: Tensor) -> None:
        """Write ``lines``, uint8 ``[n, line_bytes]``, under ``keys``, in the place of the longest
        unused rows where there is no room; some find none.

        Args:
            keys: int64 ``[n]``, each at most once a table.
            tables: int32 ``[n]``: -1 for keys that are left out.
        """
        self.epoch.add_(1)
        slots = find_slots(self.hash_tables, keys, tables)
        # Rows that are there already are not to make room for others of this call.
        now = torch.where(slots < 0, torch.iinfo(torch.int64).min, self.epoch)
        self.hash_tables.touched.scatter_reduce_(0, slots.clamp_min(0), now, "amax")
        inserted = insert_keys(
            self.hash_tables,
            keys,
            tables,
            slots,
            policy=Policy.LRU,
            epoch=self.epoch,
            released=self.epoch - 1,
        )
        self.memory.write(inserted.slots, lines)

    def load(self, keys: Tensor, tables: Tensor, lines: Tensor) -> LoadedCounts:
        """Write ``lines`` under ``keys`` that have no row, and evict none for them; arguments as
        :meth:`insert`. Waits for the device."""
        self.epoch.add_(1)
        before = find_slots(self.hash_tables, keys, tables)
        is_held = before >= 0
        num_changed = int((self.memory.read(before[is_held]) != lines[is_held]).any(1).sum())
        if num_changed:
            return LoadedCounts(num_changed, 0)
        inserted = insert_keys(
            self.hash_tables,
            keys,
            tables,
            before,
            policy=Policy.LRU,
            epoch=self.epoch,
            released=torch.zeros_like(self.epoch),
        )
        self.memory.write(inserted.slots, lines)
        return LoadedCounts(0, int(((inserted.slots < 0) & (tables >= 0)).sum()))

    def update(self, keys: Tensor, tables: Tensor, lines: Tensor) -> None:
        """Write ``lines`` under those of ``keys`` that have a row; arguments as :meth:`insert`."""
        self.memory.write(find_slots(self.hash_tables, keys, tables), lines)

    def erase(self, keys: Tensor, tables: Tensor) -> None:
        """Free the slots of ``keys``, which may come several times."""
        erase_keys(self.hash_tables, keys, tables, released=self.epoch)

    def next_keys(self, share: float) -> list[tuple[int, Tensor]]:
        """The keys in the next ``share`` of the slots, going around all of them from call to call:
        for each table that has some its number, and int64 ``[n]`` on the CPU. One thread at a time;
        waits for a GPU."""
        num_chosen = min(self.num_slots, math.ceil(share * self.num_slots))
        first = self._next_slot
        self._next_slot = (first + num_chosen) % self.num_slots
        found: list[tuple[int, Tensor]] = []
        for begin, end in (
            (first, min(first + num_chosen, self.num_slots)),
            (0, first + num_chosen - self.num_slots),
        ):
            part = slice(begin, max(begin, end))
            is_held = self.hash_tables.digests[part] > 0
            keys = self.hash_tables.keys[part][is_held].cpu()
            tables = self.table_of_slot[part][is_held].cpu()
            found += [(table, keys[tables == table]) for table in tables.unique().tolist()]
        return found

    def _weight(self) -> Tensor | None:
        """The rows as a matrix; None where they are not one on the device."""
        if self.row_format.has_scale or isinstance(self.memory, HostLines):
            return None
        return self.memory.lines.view(self.row_format.dtype)
