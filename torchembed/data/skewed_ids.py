"""Ids as skewed as those of real logs: few rows get most of the lookups."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchembed.core.random_bits import name_key
from torchembed.data.counter_bits import counter_bits

_CELL_BITS = 14
_FRACTION_BITS = 64 - _CELL_BITS


class PowerLaw:
    """Draws ids, the k-th most frequent (from 0) with probability about ``c * (k + 1)**-exponent``.

    A rank is the floor of the continuous law's quantile, which is taken as linear within each of
    16384 cells of equal probability; so drawing costs no powers. Which id has which rank is a
    bijection that scatters the frequent ones over the table.

    Args:
        num_rows: ids are in ``[0, num_rows)``.
        exponent: 0 for uniform ids; the larger, the more skewed.
        seed: names the bijection.
    """

    def __init__(self, num_rows: int, exponent: float, seed: int = 0) -> None:
        if not 1 <= num_rows <= 1 << 40:
            raise ValueError(f"num_rows must lie in [1, 2**40], got {num_rows}")
        if not 0 <= exponent < math.inf:
            raise ValueError(f"exponent must be a finite number of at least 0, got {exponent}")
        self.num_rows = num_rows
        self._quantiles = self._make_quantiles(exponent)
        self._bits = max((num_rows - 1).bit_length(), 1)
        key = name_key(seed, "scatter", str(num_rows))
        # Odd, so that multiplying modulo a power of two is a bijection.
        self._factors = counter_bits(key, np.arange(3)) | np.uint64(1)

    def _make_quantiles(self, exponent: float) -> NDArray[np.float64]:
        part = np.linspace(0.0, 1.0, (1 << _CELL_BITS) + 1)
        log_rows, power = np.log1p(float(self.num_rows)), 1.0 - exponent
        if abs(power) < 1e-9:
            return np.expm1(part * log_rows)
        # Of a large exponent the last ids have no part that float64 holds beside the others': the
        # last quantile is then infinite.
        with np.errstate(divide="ignore"):
            quantiles = np.expm1(np.log1p(part * np.expm1(power * log_rows)) / power)
        return np.where(np.isinf(quantiles), float(self.num_rows), quantiles)

    def ranks(self, bits: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The rank, from 0 for the most frequent, that each 64 random bits draw."""
        cell = (bits >> np.uint64(_FRACTION_BITS)).astype(np.int64)
        fraction = (bits & np.uint64((1 << _FRACTION_BITS) - 1)).astype(np.float64)
        fraction *= 2.0**-_FRACTION_BITS
        low = self._quantiles[cell]
        ranks = (low + fraction * (self._quantiles[cell + 1] - low)).astype(np.int64)
        return np.minimum(ranks, self.num_rows - 1, out=ranks)

    def scatter(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The id that has each rank."""
        ids = self._mix(ranks.astype(np.uint64))
        # A bijection of the next power of two, walked along its cycles until it is back in range.
        outside = np.flatnonzero(ids >= self.num_rows)
        while len(outside):
            ids.flat[outside] = self._mix(ids.flat[outside])
            outside = outside[ids.flat[outside] >= self.num_rows]
        return ids.astype(np.int64)

    def _mix(self, value: NDArray[np.uint64]) -> NDArray[np.uint64]:
        mask, shift = np.uint64((1 << self._bits) - 1), np.uint64((self._bits + 1) // 2)
        for factor in self._factors:
            value = (value * factor + (factor >> np.uint64(32))) & mask
            value ^= value >> shift
        return value

    def draw(self, bits: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The id that each 64 random bits draw."""
        return self.scatter(self.ranks(bits))


def skewed_ids(
    num_rows: int, num_ids: int, *, exponent: float = 1.05, seed: int = 0, first: int = 0
) -> Tensor:
    """``[num_ids]`` int64 ids of a :class:`PowerLaw` over ``num_rows``.

    Args:
        num_rows: ids are in ``[0, num_rows)``.
        num_ids: how many.
        exponent: of the law.
        seed: the sequence and the places of the frequent ids are functions of it.
        first: where in the sequence to begin; ``skewed_ids(r, n, first=k)`` are the last n of
            ``skewed_ids(r, k + n)``.
    """
    bits = counter_bits(name_key(seed, "draw"), np.arange(first, first + num_ids))
    return torch.from_numpy(PowerLaw(num_rows, exponent, seed).draw(bits))
