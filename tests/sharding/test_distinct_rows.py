"""How many rows ids touch, against ids that are drawn."""

import functools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.support.tolerance import DEVIATIONS, relative_error
from torchembed.data.skewed_ids import skewed_ids
from torchembed.sharding.planning.distinct_rows import (
    _NUM_CELLS,
    MAX_EXPONENT,
    expected_distinct,
    exponent_of,
)

NUM_IDS = 20_000


class Touched(NamedTuple):
    """How many rows ids touch, row by row."""

    mean: float
    drawn: float
    """How far the number that is drawn may be from the mean."""
    modelled: float
    """How far ``expected_distinct`` may be from the mean."""


def touched(num_rows: int, num_ids: int, exponent: float) -> Touched:
    rows = np.arange(1.0, num_rows + 2)
    power = 1 - exponent
    shares = np.diff(np.log(rows) if power == 0 else (rows**power - 1) / power)
    total = shares.sum()
    missed = np.exp(num_ids * np.log1p(-shares / total))
    # Rows compete for ids, so that the variance is less than the sum of theirs.
    deviation = np.sqrt((missed * (1 - missed)).sum())

    def lost(edges: np.ndarray) -> float:
        """Over intervals in each of which the density becomes its mean, the most by which that
        increases the integral of ``1 - exp(-density)``: half the second derivative's largest size
        times the variance, itself a quarter of the squared range at most."""
        density = num_ids * edges**-exponent / total
        high, low = density[:-1], density[1:]
        return float((np.diff(edges) * np.exp(-low) * (high - low) ** 2 / 8).sum())

    # One mean for each row on this side, for each cell on that, both of one integral. And counts
    # of a Poisson law miss a row more often than so many ids do, by n p**2 exp(-n p) at most for a
    # row of probability p, which is 1 / e over all rows.
    cells = np.geomspace(1.0, num_rows + 1.0, _NUM_CELLS + 1)
    modelled = max(lost(rows), lost(cells)) + math.exp(-1)
    return Touched(float((1 - missed).sum()), float(DEVIATIONS * deviation), modelled)


@pytest.mark.parametrize("num_rows", [3, 500, 40_000, 3_000_000])
@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 1.4])
def test_of_drawn_ids(num_rows: int, exponent: float) -> None:
    found = skewed_ids(num_rows, NUM_IDS, exponent=exponent).unique().numel()
    expected = expected_distinct(num_rows, [(NUM_IDS, exponent)])
    true = touched(num_rows, NUM_IDS, exponent)
    assert abs(expected - true.mean) <= true.modelled
    assert abs(found - true.mean) <= true.drawn
    if 0.001 * num_rows < found < 0.98 * num_rows:
        known = exponent_of(num_rows, NUM_IDS, found)
        off = abs(expected - true.mean) + true.drawn
        least, most = (exponent_of(num_rows, NUM_IDS, found + by) for by in (off, -off))
        assert least <= exponent <= most
        # What one batch says holds for eight times as many ids.
        more = skewed_ids(num_rows, 8 * NUM_IDS, exponent=exponent).unique().numel()
        of_more = touched(num_rows, 8 * NUM_IDS, exponent)
        predicted, modelled, highest, lowest = (
            expected_distinct(num_rows, [(8 * NUM_IDS, each)])
            for each in (known, exponent, least, most)
        )
        allowed = highest - lowest + abs(modelled - of_more.mean) + of_more.drawn
        assert abs(predicted - more) <= allowed


def test_features_share_what_is_popular() -> None:
    one = expected_distinct(1000, [(300, 1.0)])
    # Sums over cells, of positive numbers after a dozen roundings each.
    near = functools.partial(
        pytest.approx, rel=2 * relative_error(_NUM_CELLS + 12, torch.float64), abs=0
    )
    assert expected_distinct(1000, [(100, 1.0), (200, 1.0)]) == near(one)
    assert expected_distinct(1000, [(300, 1.0), (0, 0.0)]) == near(one)
    two = expected_distinct(1000, [(300, 1.0), (300, 0.0)])
    assert one < two < one + expected_distinct(1000, [(300, 0.0)])


def test_numbers_that_no_law_gives() -> None:
    assert exponent_of(1000, 500, 500) == 0.0  # not even uniform ids all differ
    assert exponent_of(1000, 500, 1) == MAX_EXPONENT
    assert expected_distinct(1000, [(0, 0.0)]) == expected_distinct(1000, [(0, 1.0)]) == 0.0


def test_uniform_ids_are_a_law_of_exponent_zero() -> None:
    exponent = 1e-12
    # A share is off by a hundred roundings at most, most of them the logarithm's, which the
    # exponential enlarges as the number is large; a cell may be the difference of two shares that
    # are as many times as large as there are cells.
    rounding = relative_error(2 * 100 * _NUM_CELLS, torch.float64)
    for num_rows in (1, 7, 10**6):
        by_cells = expected_distinct(num_rows, [(1000, exponent)])
        uniform = expected_distinct(num_rows, [(1000, 0.0)])
        # No row is more or less likely than under the uniform law by more than this factor.
        factor = (num_rows + 1) ** exponent
        np.testing.assert_allclose(by_cells, uniform, rtol=factor - 1 + rounding)
