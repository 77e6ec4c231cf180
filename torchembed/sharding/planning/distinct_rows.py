"""The number of different rows that ids touch, drawn independently: uniform, or by a power law.

With exponent ``s`` the k-th most frequent row, from 1, is drawn with a probability like that of
``[k, k + 1)`` under the density ``x ** -s``; with 0 all are equally frequent. Real ids nearly
follow such a law. Its exponent follows from one number: the count of different ids in a batch.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_EXPONENT = 4.0
"""Largest exponent; from there on some nine in ten ids are the same row."""
_NUM_CELLS = 256
"""Cells that the rows are divided into, in a geometric series: the rows of one are about equally
likely, so that sums over cells stand for sums over rows."""
_NUM_HALVINGS = 40
_MOST_BATCHES = 2.0**100


def expected_distinct(num_rows: int, drawn: Sequence[tuple[float, float]]) -> float:
    """Expected number of different rows, out of ``num_rows``.

    Args:
        drawn: numbers of ids and the exponents of their laws, all of which rank the rows by
            frequency in the same order.
    """
    if all(exponent == 0 for _, exponent in drawn):
        return -num_rows * math.expm1(-sum(count for count, _ in drawn) / num_rows)
    edges = np.geomspace(1.0, num_rows + 1.0, _NUM_CELLS + 1)
    widths = np.diff(edges)
    # Expected ids of each row of a cell. Their number is Poisson distributed, so that a row is
    # touched with probability 1 - exp(-expected).
    per_row = sum(count * np.diff(_shares(edges, exponent)) for count, exponent in drawn) / widths
    return float((widths * -np.expm1(-per_row)).sum())


def _shares(edges: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    """Cumulative probability up to each of ``edges``, the last of which is the end."""
    power = 1.0 - exponent
    logs = np.log(edges)
    below = logs if abs(power) < 1e-9 else np.expm1(power * logs) / power
    return below / below[-1]


@functools.lru_cache(maxsize=4096)
def expected_misses(num_rows: int, drawn: tuple[tuple[float, float], ...], cached: float) -> float:
    """Expected number of different rows of a batch that are not among the ``cached`` rows that were
    used last, out of ``num_rows``.

    Those are the rows of as many batches before as touch so many, so that each further batch
    touches as many rows beyond them (the characteristic time of H. Che, Y. Tung and Z. Wang,
    "Hierarchical web caching systems", 2002). Of uniform ids it is the share of the rows that is
    not cached.

    Args:
        drawn: of a batch, as for :func:`expected_distinct`.
    """
    if cached >= num_rows:
        return 0.0

    def touched(num_batches: float) -> float:
        return expected_distinct(num_rows, [(num_batches * ids, law) for ids, law in drawn])

    low, high = 0.0, 1.0
    while touched(high) < cached and high < _MOST_BATCHES:
        low, high = high, 2 * high
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        if touched(middle) < cached:
            low = middle
        else:
            high = middle
    return max(touched(high + 1) - touched(high), 0.0)


@functools.lru_cache(maxsize=4096)
def exponent_of(num_rows: int, num_ids: float, num_distinct: float) -> float:
    """The exponent under which ``num_ids`` ids touch ``num_distinct`` of ``num_rows`` rows: 0 where
    uniform ids would touch no more, and at most ``MAX_EXPONENT``."""
    if expected_distinct(num_rows, [(num_ids, 0.0)]) <= num_distinct:
        return 0.0
    low, high = 0.0, MAX_EXPONENT
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        if expected_distinct(num_rows, [(num_ids, middle)]) > num_distinct:
            low = middle
        else:
            high = middle
    return high
