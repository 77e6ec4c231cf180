"""The cache of rows on the devices that look them up."""

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.key_partitions import partition_of
from torchembed.ops.cached_lookup import FoundLines
from torchembed.ops.hash_table import Counter
from torchembed.serving.levels.cache_access import CacheAccess
from torchembed.serving.levels.cache_group import Bags, CacheGroup
from torchembed.serving.levels.cache_sizes import rows_of_device, rows_of_tables
from torchembed.serving.levels.line_memory import HostLines
from torchembed.serving.levels.served_table import ServedTable, distinct_tables


class CacheKind(enum.Enum):
    """What a cache holds, and how it changes."""

    DYNAMIC = "dynamic"
    """Rows that were used last; others are read from the levels below and take their places."""
    STATIC = "static"
    """Whole tables, as they were loaded: they take no updates, and there is no level below."""
    UVM = "uvm"
    """Whole tables in memory of the host, which lookups read by themselves, and on the device the
    rows that are used most. Updates write them, and add rows."""


CACHED_KEY_BYTES = 21
"""Memory of a slot beside its row: a key, its digest, its last use, and the number of its table."""


class FoundRows(NamedTuple):
    """Where the rows of some ids are, in each group and on each device of the cache."""

    parts: tuple[tuple[FoundLines, ...], ...]
    """For each group and device; those of other groups and devices are as no ids there."""
    is_missing: Tensor
    """bool ``[L]``: True for ids that are not cached."""
    num_missing: Tensor
    """int64 ``[1]``: how many these are."""


class CachedRows(NamedTuple):
    """Answer of :meth:`EmbeddingCache.look_up`."""

    rows: Tensor
    """float32 ``[L, D]``, D the greatest dim of the tables: default rows where ids are not cached,
    zeros where there is no id and behind narrower rows."""
    is_missing: Tensor
    """bool ``[L]``: True for ids that are not cached."""
    num_missing: Tensor
    """int64 ``[1]``: how many these are, on the device."""
    found: FoundRows


class TableCounts(NamedTuple):
    """Counts of a table in a cache since that was made."""

    num_hits: int
    """Ids that had a row, repeated ones counted."""
    num_misses: int
    """Ids that had none."""
    num_rows: int
    """Rows that are cached."""
    capacity: int
    """Rows that there is room for."""
    num_insertions: int
    num_evictions: int
    num_refusals: int
    """Rows that found no room, since that was taken by others of the same insertion."""


class EmbeddingCache:
    """Rows of served tables on one device, or divided over several by partitions of their keys.

    Tables of one dim and format are one array of rows and one hash table, whatever their number.
    A lookup is a few operations of static shapes on the device and waits for nothing, so that it
    may be captured in a CUDA graph; the number of ids that it misses is a tensor. Any number of
    threads may look up and change rows at once: whoever does so enters :attr:`access` first, and
    no row is then ever read while it is written.

    Args:
        tables: of several equal ones one counts, so that models share tables by their names.
        device: one device, or several: the first one takes keys and gives rows.
        num_rows: rows that there is room for: of each table by its name, or of all together, in
            equal parts. Rounded up to whole buckets of keys. Kinds that hold whole tables take
            their numbers of rows here, and have an eighth more room, so that each key finds some.
        num_bytes: in place of it, the bytes of rows of all tables, in equal parts.
        kind: what it holds.
        num_device_rows: for ``CacheKind.UVM``, and for it alone: the rows of all tables together
            that are on the devices.

    Raises:
        TypeError, ValueError: for arguments that do not fit.
    """

    def __init__(
        self,
        tables: Sequence[ServedTable],
        device: torch.device | str | Sequence[torch.device | str] = "cpu",
        *,
        num_rows: int | Mapping[str, int] | None = None,
        num_bytes: int | None = None,
        kind: CacheKind = CacheKind.DYNAMIC,
        num_device_rows: int | None = None,
    ) -> None:
        self.tables = distinct_tables(tables)
        if (kind is CacheKind.UVM) != (num_device_rows is not None):
            raise ValueError(
                "num_device_rows must be given for a cache of CacheKind.UVM, and for no other, got "
                f"{num_device_rows} for {kind}"
            )
        if num_device_rows is not None and num_device_rows < 1:
            raise ValueError(f"num_device_rows must be at least 1, got {num_device_rows}")
        self.kind = kind
        given = [device] if isinstance(device, (str, torch.device)) else list(device)
        if not given:
            raise ValueError("device must name at least one device, got none")
        self.devices = tuple(map(_with_index, given))
        self.access = CacheAccess(self.devices)
        counts = [
            rows_of_device(count, len(self.devices), is_whole=kind is not CacheKind.DYNAMIC)
            for count in rows_of_tables(self.tables, num_rows, num_bytes)
        ]
        self.members = _by_form(self.tables)
        """The places of each group's tables among :attr:`tables`."""
        self.group_of = [0] * len(self.tables)
        for group, places in enumerate(self.members):
            for place in places:
                self.group_of[place] = group
        self._groups = [
            [
                CacheGroup(
                    [self.tables[place] for place in places],
                    [counts[place] for place in places],
                    each,
                    num_on_device,
                )
                for each in self.devices
            ]
            for places, num_on_device in zip(
                self.members, self._device_rows(counts, num_device_rows), strict=True
            )
        ]
        local = torch.full((len(self.members), len(self.tables) + 1), -1, dtype=torch.int32)
        for group, places in enumerate(self.members):
            local[group, places] = torch.arange(len(places), dtype=torch.int32)
        self._local_tables = local.to(self.device)
        """The number of each table in each group, -1 of those of others; the last one, which index
        -1 reads, is of no table."""

    @property
    def device(self) -> torch.device:
        """The device that keys come to and rows are given on."""
        return self.devices[0]

    def find(
        self, keys: Tensor, tables: Tensor, *, is_use: bool = True, reads: bool = False
    ) -> FoundRows:
        """Find the rows of ids: one call of :func:`cached_lookup` for each group and device.

        Args:
            keys: int64 ``[L]``.
            tables: int32 ``[L]``: places among :attr:`tables`, -1 where there is no id.
            is_use: whether the rows are recent from then on, and counted.
            reads: whether they are read, too, as :meth:`read` needs it.
        """
        if len(self._groups) == len(self.devices) == 1:
            (shard,) = self._groups[0]
            only = shard.find(keys, tables, is_use=is_use, reads=reads)
            return FoundRows(((only,),), only.is_missing, only.num_missing)
        owners = partition_of(keys, len(self.devices)) if len(self.devices) > 1 else None
        all_parts: list[tuple[FoundLines, ...]] = []
        is_missing = torch.zeros(keys.shape, dtype=torch.bool, device=self.device)
        for local, shards in zip(self._local_tables, self._groups, strict=True):
            local_tables = tables if len(self._groups) == 1 else local[tables.long()]
            parts: list[FoundLines] = []
            for number, shard in enumerate(shards):
                of_shard = local_tables
                if owners is not None:
                    of_shard = torch.where(owners == number, local_tables, -1)
                there = keys.to(shard.device), of_shard.to(shard.device)
                found = shard.find(*there, is_use=is_use, reads=reads)
                is_missing |= found.is_missing.to(self.device)
                parts.append(found)
            all_parts.append(tuple(parts))
        return FoundRows(tuple(all_parts), is_missing, is_missing.sum(0, keepdim=True))

    @property
    def is_matrix(self) -> bool:
        """True where rows can be pooled without being read first."""
        return all(shard.is_matrix for shards in self._groups for shard in shards)

    def look_up(self, keys: Tensor, tables: Tensor) -> CachedRows:
        """Look up the rows of ids that are cached, without any level below: a pure function of
        tensors of static shapes, which waits for nothing and may be captured in a CUDA graph.
        Whoever replays that is inside :attr:`access` as if it called this. Of few ids in tables of
        one dim and format on one GPU it is one launch.

        Args:
            keys: int64 ``[L]`` on :attr:`device`.
            tables: int32 ``[L]`` likewise: places among :attr:`tables`, -1 where there is no id.
        """
        found = self.find(keys, tables, reads=True)
        groups = [self.read(found, group) for group in range(len(self.members))]
        if len(groups) > 1:
            dim = max(rows.shape[1] for rows in groups)
            groups = [torch.nn.functional.pad(rows, (0, dim - rows.shape[1])) for rows in groups]
        return CachedRows(_sum(groups), found.is_missing, found.num_missing, found)

    def read(self, found: FoundRows, group: int) -> Tensor:
        """The rows of the ids of a group's tables, which ``found`` has read, default rows where
        they are missing: float32 ``[L, dim]``, zeros for all other ids."""
        return _sum([part.rows.to(self.device) for part in found.parts[group]])

    def pool(
        self,
        found: FoundRows,
        group: int,
        bags: Bags,
    ) -> Tensor:
        """Pool the rows of the ids of a group's tables, straight from the cache where it
        :attr:`is_matrix`, else as ``found`` has read them: float32 ``[B, F, dim]``, in which other
        ids count as zeros."""
        parts = [
            shard.pool(part, bags.to(shard.device)).to(self.device)
            for shard, part in zip(self._groups[group], found.parts[group], strict=True)
        ]
        return _sum(parts)

    def insert(self, table: int, keys: Tensor, lines: Tensor) -> None:
        """Write rows, in the place of the longest unused ones where there is no room.

        Args:
            table: place among :attr:`tables`.
            keys: int64 ``[n]``, all different.
            lines: uint8 ``[n, line_bytes]`` of the table's format.
        """
        for shard, tables in self._owners(table, keys):
            shard.insert(keys.to(shard.device), tables, lines.to(shard.device))

    def load(self, table: int, keys: Tensor, lines: Tensor) -> None:
        """Write rows of a whole table, none of which makes room for another; arguments as
        :meth:`insert`. Rows that are there already may come again. Waits for the devices.

        Raises:
            ValueError: for keys that have another row, before anything is written, and where there
                is no room for all.
        """
        for shard, tables in self._owners(table, keys):
            found = shard.load(keys.to(shard.device), tables, lines.to(shard.device))
            name = self.tables[table].name
            if found.num_changed:
                raise ValueError(
                    f"rows of table {name!r} must be those that were loaded, got "
                    f"{found.num_changed} others for ids that have one; serve rows by version, or "
                    "make the cache with CacheKind.DYNAMIC or CacheKind.UVM"
                )
            if found.num_refused:
                raise ValueError(
                    f"the cache must have room for all rows of table {name!r}, got "
                    f"{found.num_refused} too many; give a larger num_rows"
                )

    def keep(self, found: FoundRows) -> None:
        """Note the uses of the rows of ``found``, for ``CacheKind.UVM``, and have those of its rows
        on the devices that were used more, lately, than others there. Waits for the devices."""
        for shards, parts in zip(self._groups, found.parts, strict=True):
            for shard, part in zip(shards, parts, strict=True):
                assert isinstance(shard.memory, HostLines)
                shard.memory.keep(part.slots)

    def update(self, table: int, keys: Tensor, lines: Tensor) -> None:
        """Write the rows of those of ``keys`` that are cached; arguments as :meth:`insert`."""
        for shard, tables in self._owners(table, keys):
            shard.update(keys.to(shard.device), tables, lines.to(shard.device))

    def erase(self, table: int, keys: Tensor) -> None:
        """Take the rows of ``keys`` out of the cache, where they are in it."""
        for shard, tables in self._owners(table, keys):
            shard.erase(keys.to(shard.device), tables)

    def next_keys(self, share: float) -> list[tuple[int, Tensor]]:
        """The keys of the next ``share`` of the slots, going around all of them from call to call:
        tables' places among :attr:`tables`, and keys int64 ``[n]`` on the CPU; waits for the
        devices."""
        found: list[tuple[int, Tensor]] = []
        for places, shards in zip(self.members, self._groups, strict=True):
            for shard in shards:
                found += [(places[local], keys) for local, keys in shard.next_keys(share)]
        return found

    def counts(self) -> dict[str, TableCounts]:
        """Counts of each table, by its name; waits for the devices."""
        found: dict[str, TableCounts] = {}
        for places, shards in zip(self.members, self._groups, strict=True):
            counters = [shard.hash_tables.counters.cpu() for shard in shards]
            counts = torch.stack(counters).sum(0).tolist()
            for local, place in enumerate(places):
                of_table = counts[local]
                found[self.tables[place].name] = TableCounts(
                    num_hits=of_table[Counter.HITS],
                    num_misses=of_table[Counter.MISSES],
                    num_rows=of_table[Counter.SIZE],
                    capacity=sum(shard.capacities[local] for shard in shards),
                    num_insertions=of_table[Counter.INSERTED],
                    num_evictions=of_table[Counter.EVICTED_FULL],
                    num_refusals=of_table[Counter.REFUSED],
                )
        return found

    def _device_rows(self, counts: Sequence[int], num_rows: int | None) -> list[int | None]:
        """The rows of each group that are on one device, in proportion to the group's; None for
        all of them."""
        if num_rows is None:
            return [None] * len(self.members)
        all_rows = sum(counts)
        of_groups = [sum(counts[place] for place in places) for places in self.members]
        of_devices = all_rows * len(self.devices)
        return [max(1, min(n, -(-num_rows * n // of_devices))) for n in of_groups]

    def _owners(self, table: int, keys: Tensor) -> Iterator[tuple[CacheGroup, Tensor]]:
        """Each shard of a table's group, and the table there of each of ``keys [n]``, int32 ``[n]``
        on the shard's device: -1 for keys of other shards."""
        group = self.group_of[table]
        local = self.members[group].index(table)
        owners = partition_of(keys, len(self.devices))
        for number, shard in enumerate(self._groups[group]):
            tables = torch.where(owners == number, local, -1).int()
            yield shard, tables.to(shard.device)


def _with_index(device: torch.device | str) -> torch.device:
    """``device``, with the number of the current GPU where it is one without."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _by_form(tables: Sequence[ServedTable]) -> list[list[int]]:
    """The places of tables of each dim and format."""
    places: dict[tuple[int, object], list[int]] = {}
    for place, table in enumerate(tables):
        places.setdefault((table.dim, table.row_format), []).append(place)
    return list(places.values())


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)
