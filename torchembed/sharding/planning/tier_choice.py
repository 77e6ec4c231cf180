"""The choice of tables that leave the devices, for host memory or disk, and of how much of each the
faster memories hold."""

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from torchembed.sharding.planning.costs import CostModel
from torchembed.sharding.planning.storage_costs import (
    LINE_INDEX_BYTES,
    PlannedCache,
    cache_index_bytes,
    place_index_bytes,
)
from torchembed.sharding.planning.table_use import TableUse
from torchembed.tables import HostMemory, is_function_of_id

_LEAST_BATCHES = 2
"""Batches whose rows the smallest cache holds: the one that is trained and the one after it. Host
memory of a table on disk has room for as many beside the rows that are cached."""
_STEP = math.sqrt(2)
"""Each cache that is considered holds the rows of so many times the batches of the one before."""
_DISK_STRIDE = 2
"""Tables on disk, which have two caches, are given every second of those sizes."""
_DEVIATIONS = 6
"""Standard deviations by which the rows of those batches may exceed their expected number."""
_MOST_BATCHES = 2.0**40
_NUM_HALVINGS = 24
"""They leave a price uncertain by a hundred-thousandth of it. Each step of a search looks for one
of the next faster kind of memory, so the time grows with the third power of this."""


class _Memory(enum.IntEnum):
    """Kinds of memory, from the fastest one."""

    DEVICE = 0
    HOST = 1
    DISK = 2


_PRICES = {_Memory.DEVICE: (1e-30, 1e12), _Memory.HOST: (1e-30, 1e3), _Memory.DISK: (1e-30, 1e3)}
"""Seconds for a byte of memory: so few that all of it is bought, and so many that none is."""


class _Cache(NamedTuple):
    """A cache of the rows of the last batches."""

    num_rows: int
    num_missing: float
    """Rows of a step that it does not hold."""


class _Level(NamedTuple):
    """A way to store a table, and what it takes on all ranks together."""

    cache: PlannedCache | None
    """None for a table on the devices."""
    num_bytes: tuple[float, float, float]
    """Bytes of each kind of memory."""
    seconds: float
    """Time in a step for rows that are not cached."""


class TierChoice:
    """Chooses tables that leave the devices, of those that need not be there.

    Each table is stored so that its time for rows that are not cached, and the price of the memory
    that it takes, are least together. The prices are the lowest at which devices, hosts and disks
    have room for all: at each table the last bytes of memory save the same time for their number.

    Args:
        tables: that may be anywhere; on disk those whose initial rows follow from their ids.
    """

    def __init__(self, tables: Mapping[str, TableUse], model: CostModel) -> None:
        self._model = model
        self._levels = {name: list(self._levels_of(use)) for name, use in tables.items()}
        most = max(map(len, self._levels.values()))
        self._seconds = np.full((len(tables), most), math.inf)
        self._bytes = np.zeros((len(_Memory), len(tables), most))
        for number, levels in enumerate(self._levels.values()):
            self._seconds[number, : len(levels)] = [level.seconds for level in levels]
            of_levels = np.array([level.num_bytes for level in levels])
            self._bytes[:, number, : len(levels)] = of_levels.T

    def within(
        self, device_bytes: float, host_bytes: float, disk_bytes: float
    ) -> dict[str, PlannedCache]:
        """Each table that leaves the devices, so that tables take so much on all devices, hosts and
        disks, or the least on devices that they can."""
        budgets = (device_bytes, host_bytes, disk_bytes)
        picks = self._filled(self._bought(_Memory.DISK, self._seconds, budgets), budgets)
        chosen = {
            name: levels[pick].cache
            for (name, levels), pick in zip(self._levels.items(), picks, strict=True)
        }
        return {name: cache for name, cache in chosen.items() if cache is not None}

    def _bought(self, kind: _Memory, costs: np.ndarray, budgets: Sequence[float]) -> np.ndarray:
        """A level of each table, ``[T]``, of the least ``costs [T, levels]`` and price of memory of
        ``kind`` and of faster kinds, at the lowest prices at which there is room for all."""

        of_kind, tables = self._bytes[kind], np.arange(len(costs))

        def at(price: float) -> np.ndarray:
            priced = costs + price * of_kind if price else costs
            if kind is _Memory.DEVICE:
                return priced.argmin(axis=1)
            return self._bought(_Memory(kind - 1), priced, budgets)

        def fits(picks: np.ndarray) -> bool:
            return bool(of_kind[tables, picks].sum() <= budgets[kind])

        low, high = _PRICES[kind]
        picks = at(0.0)
        if not fits(picks):
            picks = at(high)
            if not fits(picks):  # nor would any at a lower price
                return picks
            for _ in range(_NUM_HALVINGS):
                price = math.sqrt(low * high)
                found = at(price)
                is_enough = fits(found)
                low, high = (low, price) if is_enough else (price, high)
                picks = found if is_enough else picks
        return picks

    def _filled(self, picks: np.ndarray, budgets: Sequence[float]) -> np.ndarray:
        """``picks``, or faster ones in the memory that they leave: prices alone leave some."""
        tables = np.arange(len(self._levels))
        picks = picks.copy()
        while True:
            taken = self._bytes[:, tables, picks]
            left = np.array(budgets) - taken.sum(axis=1)
            more = self._bytes - taken[:, :, None]
            seconds = self._seconds - self._seconds[tables, picks][:, None]
            is_better = (seconds < 0) & (more <= left[:, None, None]).all(axis=0)
            if not is_better.any():
                return picks
            gains = np.where(is_better, -seconds / np.maximum(more[_Memory.DEVICE], 1.0), 0.0)
            table, level = np.unravel_index(gains.argmax(), gains.shape)
            picks[table] = level

    def _levels_of(self, use: TableUse) -> Iterator[_Level]:
        """The devices; host memory behind each cache; disk behind each pair of two."""
        topology, num_rows = self._model.topology, use.spec.num_rows
        line_bytes = self._model.line_bytes(use, use.spec.dim)
        whole, of_ids = num_rows * line_bytes, use.index_bytes(num_rows)
        host_line_bytes = self._model.host_line_bytes(use, use.spec.dim, HostMemory(cache_rows=1))
        yield _Level(None, (whole + of_ids, 0.0, 0.0), 0.0)
        caches = list(self._caches_of(use))

        def on_device(num_cached: int) -> int:
            of_index = cache_index_bytes(num_cached, num_rows, is_rounded=use.is_rounded)
            return num_cached * line_bytes + of_index

        if topology.host.memory_bytes and not topology.devices_are_hosts:
            for num_cached, missing in caches:
                taken = on_device(num_cached)
                if taken < whole:
                    seconds = missing * line_bytes / topology.host_bandwidth
                    cache = PlannedCache(num_cached)
                    in_host = num_rows * host_line_bytes
                    yield _Level(cache, (taken + of_ids, in_host, 0.0), seconds)
        if topology.disk.path is None or not is_function_of_id(use.spec.initializer):
            return
        on_disk = self._model.disk_line_bytes(line_bytes) / topology.disk_bandwidth
        of_disk = caches[::_DISK_STRIDE]
        for num_cached, missing in of_disk[:1] if topology.devices_are_hosts else of_disk:
            for num_in_host, missing_there in of_disk:
                if num_in_host < num_cached + caches[0].num_rows:
                    continue
                taken = on_device(num_cached)
                taken += place_index_bytes(
                    num_in_host, num_rows, takes_any_id=use.spec.index.takes_any_id
                )
                in_host = num_in_host * line_bytes + num_rows * LINE_INDEX_BYTES
                seconds = missing_there * on_disk
                if topology.devices_are_hosts:
                    taken, in_host = taken + in_host, 0
                else:
                    seconds += missing * line_bytes / topology.host_bandwidth
                if taken < whole:
                    cache = PlannedCache(num_cached, num_in_host)
                    yield _Level(cache, (taken + of_ids, in_host, whole), seconds)

    def _caches_of(self, use: TableUse) -> Iterator[_Cache]:
        """Caches that hold the rows of the last batches: of two or more, and smaller than the
        table."""
        num_ranks, num_batches = self._model.topology.num_ranks, float(_LEAST_BATCHES)
        while num_batches < _MOST_BATCHES:
            touched = self._model.touched(use, num_ranks * num_batches)
            num_rows = math.ceil(touched + _DEVIATIONS * math.sqrt(touched))
            if num_rows >= use.spec.num_rows:
                return
            of_next = self._model.touched(use, num_ranks * (num_batches + 1)) - touched
            yield _Cache(num_rows, max(of_next, 0.0))
            num_batches *= _STEP
