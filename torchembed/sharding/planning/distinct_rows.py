"""How many different rows ids touch, where each is drawn for itself: uniform, or by a power law.

With exponent ``s`` the k-th most frequent row, from 1, is drawn with a probability like that of
``[k, k + 1)`` under the density ``x ** -s``; with 0 all are alike. Real ids nearly follow such a
law, of which one number says all: how many different ones a batch has.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_EXPONENT = 4.0
"""Of a larger one, nine in ten ids are one row."""
_NUM_CELLS = 256
"""Of about equal probability are the rows of a cell, which grow like a geometric series."""
_NUM_HALVINGS = 40


def expected_distinct(num_rows: int, drawn: Sequence[tuple[float, float]]) -> float:
    """Different rows of ``num_rows``, expected.

    Args:
        drawn: numbers of ids and the exponents of their laws, under all of which rows are equally
            popular in one order.
    """
    if all(exponent == 0 for _, exponent in drawn):
        return -num_rows * math.expm1(-sum(count for count, _ in drawn) / num_rows)
    edges = np.geomspace(1.0, num_rows + 1.0, _NUM_CELLS + 1)
    widths = np.diff(edges)
    # Of each row of a cell the ids to come, expected; the number that come is Poisson's.
    per_row = sum(count * np.diff(_shares(edges, exponent)) for count, exponent in drawn) / widths
    return float((widths * -np.expm1(-per_row)).sum())


def _shares(edges: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    """The probability of what is less than each of ``edges``, the last of which is the end."""
    power = 1.0 - exponent
    logs = np.log(edges)
    below = logs if abs(power) < 1e-9 else np.expm1(power * logs) / power
    return below / below[-1]


@functools.lru_cache(maxsize=4096)
def exponent_of(num_rows: int, num_ids: float, num_distinct: float) -> float:
    """The exponent under which ``num_ids`` ids touch ``num_distinct`` of ``num_rows`` rows: 0 for
    as many as of uniform ids or more, and at most ``MAX_EXPONENT``."""
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
