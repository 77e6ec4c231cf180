"""Which tables a planner places in host memory, and how much of each devices cache."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from torchembed.sharding.planning.costs import CostModel
from torchembed.sharding.planning.storage_costs import cache_index_bytes
from torchembed.sharding.planning.table_use import TableUse

_LEAST_BATCHES = 2
"""Batches whose rows the smallest cache holds: the one that is trained and the one after it."""
_STEP = math.sqrt(2)
"""Each cache that is considered holds the rows of so many times the batches of the one before."""
_DEVIATIONS = 6
"""Standard deviations by which the rows of those batches may exceed their expected number."""
_MOST_BATCHES = 2.0**40
_NUM_HALVINGS = 40
_DEVICE_PRICES, _HOST_PRICES = (1e-30, 1e12), (1e-30, 1e3)
"""Seconds for a byte of memory: so few that all of it is bought, and so many that none is."""


class _Level(NamedTuple):
    """A way to store a table, and what it takes on all ranks together."""

    num_cached: int | None
    """Rows that devices cache of a table in host memory; None for a table on the devices."""
    device_bytes: float
    host_bytes: float
    seconds: float
    """Time in a step for rows that are not cached."""


class TierChoice:
    """Chooses tables that go to host memory, of those that need not be on the devices.

    Each table is stored so that its time for rows that are not cached, and the price of the memory
    that it takes, are least together. The prices are the lowest at which devices and hosts have
    room for all: at each table the last bytes of memory save the same time for their number.

    Args:
        tables: that may be anywhere.
    """

    def __init__(self, tables: Mapping[str, TableUse], model: CostModel) -> None:
        self._model = model
        self._levels = {name: list(self._levels_of(use)) for name, use in tables.items()}
        most = max(map(len, self._levels.values()))

        def numbers(of: str, filler: float) -> np.ndarray:
            rows = [[getattr(level, of) for level in levels] for levels in self._levels.values()]
            return np.array([row + [filler] * (most - len(row)) for row in rows])

        self._seconds = numbers("seconds", math.inf)
        self._device_bytes = numbers("device_bytes", 0.0)
        self._host_bytes = numbers("host_bytes", 0.0)

    def within(self, device_bytes: float, host_bytes: float) -> dict[str, int]:
        """For each table that goes to host memory the rows that devices cache, of all ranks
        together, so that tables take so much on all devices and hosts, or the least on devices
        that they can."""
        picks, fits = self._at_host_price(0.0, device_bytes, host_bytes)
        if not fits:
            low, high = _HOST_PRICES
            picks, _ = self._at_host_price(high, device_bytes, host_bytes)
            for _ in range(_NUM_HALVINGS):
                price = math.sqrt(low * high)
                found, fits = self._at_host_price(price, device_bytes, host_bytes)
                low, high = (low, price) if fits else (price, high)
                picks = found if fits else picks
        picks = self._filled(picks, device_bytes, host_bytes)
        chosen = {
            name: levels[pick].num_cached
            for (name, levels), pick in zip(self._levels.items(), picks, strict=True)
        }
        return {name: num_cached for name, num_cached in chosen.items() if num_cached is not None}

    def _at_host_price(
        self, host_price: float, device_bytes: float, host_bytes: float
    ) -> tuple[np.ndarray, bool]:
        """A level of each table for the devices' memory, ``[T]``, and whether hosts have room."""
        tables = np.arange(len(self._levels))
        costs = self._seconds + host_price * self._host_bytes

        def at(price: float) -> np.ndarray:
            return (costs + price * self._device_bytes).argmin(axis=1)

        def fits(picks: np.ndarray) -> bool:
            return self._device_bytes[tables, picks].sum() <= device_bytes

        low, high = _DEVICE_PRICES
        picks = at(0.0)
        if not fits(picks):
            picks = at(high)
            for _ in range(_NUM_HALVINGS):
                price = math.sqrt(low * high)
                found = at(price)
                is_enough = fits(found)
                low, high = (low, price) if is_enough else (price, high)
                picks = found if is_enough else picks
        return picks, self._host_bytes[tables, picks].sum() <= host_bytes

    def _filled(self, picks: np.ndarray, device_bytes: float, host_bytes: float) -> np.ndarray:
        """``picks``, or faster ones in the memory that they leave: prices alone leave some."""
        tables = np.arange(len(self._levels))
        picks = picks.copy()
        while True:
            on_device, in_host, seconds = (
                of - of[tables, picks][:, None]
                for of in (self._device_bytes, self._host_bytes, self._seconds)
            )
            left = device_bytes - self._device_bytes[tables, picks].sum()
            host_left = host_bytes - self._host_bytes[tables, picks].sum()
            is_better = (seconds < 0) & (on_device <= left) & (in_host <= host_left)
            if not is_better.any():
                return picks
            gains = np.where(is_better, -seconds / np.maximum(on_device, 1.0), 0.0)
            table, level = np.unravel_index(gains.argmax(), gains.shape)
            picks[table] = level

    def _levels_of(self, use: TableUse) -> Iterator[_Level]:
        """The devices, and caches that hold the rows of the last batches: of two or more, and
        smaller than the table."""
        topology, num_rows = self._model.topology, use.spec.num_rows
        line_bytes = self._model.line_bytes(use, use.spec.dim)
        whole, of_ids = num_rows * line_bytes, use.index_bytes(num_rows)
        yield _Level(None, whole + of_ids, 0.0, 0.0)
        num_batches = float(_LEAST_BATCHES)
        while num_batches < _MOST_BATCHES:
            touched = self._model.touched(use, topology.num_ranks * num_batches)
            num_cached = math.ceil(touched + _DEVIATIONS * math.sqrt(touched))
            on_device = num_cached * line_bytes
            on_device += cache_index_bytes(num_cached, num_rows, is_rounded=use.is_rounded)
            if num_cached >= num_rows or on_device >= whole:
                return
            of_next = self._model.touched(use, topology.num_ranks * (num_batches + 1)) - touched
            seconds = max(of_next, 0.0) * line_bytes / topology.host_bandwidth
            yield _Level(num_cached, on_device + of_ids, whole, seconds)
            num_batches *= _STEP
