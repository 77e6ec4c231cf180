"""How many rows ids touch, against ids that are drawn."""

import numpy as np
import pytest

from torchembed.data.skewed_ids import skewed_ids
from torchembed.sharding.planning.distinct_rows import MAX_EXPONENT, expected_distinct, exponent_of

NUM_IDS = 20_000


@pytest.mark.parametrize("num_rows", [3, 500, 40_000, 3_000_000])
@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 1.4])
def test_of_drawn_ids(num_rows: int, exponent: float) -> None:
    found = skewed_ids(num_rows, NUM_IDS, exponent=exponent).unique().numel()
    expected = expected_distinct(num_rows, [(NUM_IDS, exponent)])
    # Four standard deviations of the number of rows that are drawn, and a part in fifty of them,
    # since the law of whole ranks is taken as continuous.
    assert abs(found - expected) <= 4 * found**0.5 + 0.02 * found
    if 0.001 * num_rows < found < 0.98 * num_rows:
        known = exponent_of(num_rows, NUM_IDS, found)
        assert known == pytest.approx(exponent, abs=0.05)
        # What one batch says holds for eight times as many ids.
        more = skewed_ids(num_rows, 8 * NUM_IDS, exponent=exponent).unique().numel()
        assert expected_distinct(num_rows, [(8 * NUM_IDS, known)]) == pytest.approx(more, rel=0.05)


def test_features_share_what_is_popular() -> None:
    one = expected_distinct(1000, [(300, 1.0)])
    assert expected_distinct(1000, [(100, 1.0), (200, 1.0)]) == pytest.approx(one)
    assert expected_distinct(1000, [(300, 1.0), (0, 0.0)]) == pytest.approx(one)
    two = expected_distinct(1000, [(300, 1.0), (300, 0.0)])
    assert one < two < one + expected_distinct(1000, [(300, 0.0)])


def test_numbers_that_no_law_gives() -> None:
    assert exponent_of(1000, 500, 500) == 0.0  # not even uniform ids all differ
    assert exponent_of(1000, 500, 1) == MAX_EXPONENT
    assert expected_distinct(1000, [(0, 0.0)]) == expected_distinct(1000, [(0, 1.0)]) == 0.0


def test_uniform_ids_are_a_law_of_exponent_zero() -> None:
    for num_rows in (1, 7, 10**6):
        by_cells = expected_distinct(num_rows, [(1000, 1e-12)])
        np.testing.assert_allclose(by_cells, expected_distinct(num_rows, [(1000, 0.0)]), rtol=1e-9)
