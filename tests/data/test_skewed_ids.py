"""Skewed ids: the law, the bijection, and the same ids from any place on."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchembed.core.random_bits import name_key, random_bits
from torchembed.data import skewed_ids
from torchembed.data.counter_bits import counter_bits, nearly_normal, unit_uniform
from torchembed.data.skewed_ids import PowerLaw


def test_bits_are_those_of_core() -> None:
    counter = torch.tensor([0, 1, 2, 12345, (1 << 40) + 3])
    for key in (0, 1, -1, name_key(3, "x"), name_key(4, "y")):
        expected = random_bits(torch.tensor(key), counter).numpy().view(np.uint64)
        np.testing.assert_array_equal(counter_bits(key, counter.numpy()), expected)


def test_numbers_from_bits_have_their_moments() -> None:
    bits = counter_bits(5, np.arange(1 << 17))
    # Five standard errors: of the mean 1 / sqrt(n), of the variance sqrt(kurtosis - 1) / sqrt(n).
    band = 5 / np.sqrt(len(bits))
    normal = nearly_normal(bits)
    assert normal.dtype == np.float32
    assert abs(normal.mean(dtype=np.float64)) < band
    assert abs(normal.var(dtype=np.float64) - 1) < band * np.sqrt(2)
    uniform = unit_uniform(bits)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < band * np.sqrt(1 / 12)


@settings(max_examples=60)
@given(num_rows=st.integers(1, 3000), seed=st.integers(0, 5))
def test_scatter_is_a_bijection(num_rows: int, seed: int) -> None:
    ids = PowerLaw(num_rows, 1.0, seed).scatter(np.arange(num_rows))
    assert sorted(ids.tolist()) == list(range(num_rows))


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.05, 1.5])
@pytest.mark.parametrize("num_rows", [1, 2, 50, 100_000])
def test_ranks_follow_the_law(exponent: float, num_rows: int) -> None:
    num_draws = 1 << 17
    ranks = PowerLaw(num_rows, exponent).ranks(counter_bits(1, np.arange(num_draws)))
    assert ranks.min() >= 0
    assert ranks.max() < num_rows
    for bound in {1, 2, 5, num_rows // 10, num_rows // 2} - {0}:
        # The law's integral to the bound; a cell of the quantiles may differ.
        power = 1 - exponent
        if power:
            expected = ((bound + 1) ** power - 1) / ((num_rows + 1) ** power - 1)
        else:
            expected = np.log(bound + 1) / np.log(num_rows + 1)
        expected = min(expected, 1.0)
        band = 5 * np.sqrt(expected * (1 - expected) / num_draws) + 1 / (1 << 14)
        assert abs((ranks < bound).mean() - expected) <= band


def test_sequence_is_the_same_from_any_place_on() -> None:
    whole = skewed_ids(1000, 500, seed=3)
    assert whole.dtype == torch.int64
    assert torch.equal(skewed_ids(1000, 123, seed=3, first=377), whole[377:])
    assert not torch.equal(skewed_ids(1000, 500, seed=4), whole)


def test_frequent_ids_are_scattered() -> None:
    law = PowerLaw(1 << 20, 1.05, seed=1)
    frequent = np.sort(law.scatter(np.arange(64)))
    # 64 ids in a million rows: at even odds the largest gap is about a sixth of them.
    assert np.diff(frequent, prepend=0, append=1 << 20).max() < 0.25 * (1 << 20)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match=r"num_rows must lie in \[1, 2\*\*40\], got 0"):
        PowerLaw(0, 1.0)
    for exponent in (-1.0, math.inf, math.nan):
        message = f"exponent must be a finite number of at least 0, got {exponent}"
        with pytest.raises(ValueError, match=message):
            PowerLaw(5, exponent)


def test_ranks_of_a_large_exponent_are_in_range() -> None:
    bits = np.array([0, 1 << 63, (1 << 64) - 1], np.uint64)
    ranks = PowerLaw(1000, 30.0).ranks(bits)
    # The first id gets nearly all; the last cell ends with the last id.
    assert ranks.tolist() == [0, 0, 999]
