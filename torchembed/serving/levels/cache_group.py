"""The cached rows of tables of one form, on one device."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.types import Pooling
from torchembed.ops.cached_lookup import FoundLines, LineUse, cached_lookup
from torchembed.ops.hash_table import (
    HashTables,
    Policy,
    empty_hash_tables,
    erase_keys,
    find_slots,
    insert_keys,
    slot_ranges,
    table_shape,
)
from torchembed.ops.pooled_lookup import pooled_lookup
from torchembed.serving.levels.line_memory import DeviceLines, HostLines
from torchembed.serving.levels.lookup_progress import LookupProgress
from torchembed.serving.levels.served_table import ServedTable


class LoadedCounts(NamedTuple):
    """Counts of rows that could not be loaded."""

    num_changed: int
    """Rows whose keys had another row; nothing was loaded then."""
    num_refused: int
    """Rows for which there was no room."""


class Bags(NamedTuple):
    """How :func:`pooled_lookup` pools the rows of L ids: its arguments of these names."""

    offsets: Tensor | None
    hotness: tuple[int, ...] | None
    batch_size: int
    num_features: int
    per_id_weights: Tensor | None
    pooling: Pooling

    def has_one_id(self) -> bool:
        """True where each bag has exactly one id, which counts as it is."""
        is_one = self.hotness is not None and set(self.hotness) == {1}
        return is_one and self.per_id_weights is None

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
        default_slots = torch.tensor([slots.end - 1 for slots in self.ranges], device=device)
        defaults = torch.tensor([table.default for table in tables], device=device)
        default_rows = defaults[:, None].expand(-1, self.dim)
        self.memory.write(default_slots, self.row_format.encode(default_rows))
        self.table_of_slot = torch.cat(
            [
                torch.full((slots.num_slots,), table, dtype=torch.int32, device=device)
                for table, slots in enumerate(self.ranges)
            ]
        )
        """int32 ``[S]``."""
        self.epoch = torch.zeros(1, dtype=torch.int64, device=device)
        """The number of the last lookup or insertion, by which rows are the longest unused."""

        self._use = LineUse(self.epoch)
        self._progress = LookupProgress(device)
        self._next_slot = 0

    def find(
        self, keys: Tensor, tables: Tensor, *, is_use: bool = True, reads: bool = False
    ) -> FoundLines:
        """Find the rows of ``keys``, int64 ``[L]``, of ``tables``, int32 ``[L]``: -1 where there is
        no id; read them where ``reads``, as float32. Where it ``is_use`` they are recent from then
        on, and counted as hits and misses. One call of :func:`cached_lookup`."""
        return cached_lookup(
            self.hash_tables,
            keys,
            tables,
            self.memory.lines,
            line_dtype=self.row_format.dtype,
            dim=self.dim,
            progress=self._progress.take(),
            reads=reads,
            copies=self.memory.line_copies,
            use=self._use if is_use else None,
        )

    @property
    def is_matrix(self) -> bool:
        """True where the rows are a matrix on the device, which can be pooled as it is."""
        return not self.row_format.has_scale and isinstance(self.memory, DeviceLines)

    def pool(self, found: FoundLines, bags: Bags) -> Tensor:
        """Pool rows that :meth:`find` found, as :func:`pooled_lookup`: float32 ``[B, F, dim]``.
        Unless the rows are a matrix, it must have read them."""
        has_rows = len(found.rows) == len(found.slots)
        if has_rows and bags.has_one_id():
            return found.rows.view(bags.num_features, bags.batch_size, self.dim).transpose(0, 1)
        if self.is_matrix:
            weight, rows = self.memory.lines.view(self.row_format.dtype), found.slots
        else:
            assert has_rows
            weight, rows = found.rows, torch.arange(len(found.slots), device=found.slots.device)
        return pooled_lookup(weight, rows, **bags._asdict(), output_dtype=torch.float32)

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
