"""The assertions on numbers fail where they should."""

import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests.support.tolerance import (
    NUDGE_UNITS,
    assert_as_near,
    assert_follows,
    assert_same_bits,
    assert_same_sums,
    assert_within_drift,
    relative_error,
)

EXACT = torch.tensor([1.0, -4.0, 0.5], dtype=torch.float64)
EPS = torch.finfo(torch.float32).eps
BAND = 4 * EPS
"""One unit of rounding at the size of the largest exact element."""


def off_by(error: float, position: int = 2) -> Tensor:
    """The exact numbers in float32, one of them off."""
    numbers = EXACT.float()
    numbers[position] += error
    return numbers


@pytest.mark.parametrize("error", [0.0, BAND, -BAND])
def test_an_error_within_one_unit_of_rounding_passes(error: float) -> None:
    assert_as_near(off_by(error), EXACT.float(), EXACT)


@pytest.mark.parametrize("error", [BAND + EPS, -BAND - EPS, 1.0])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_error_outside_the_band_fails(error: float, position: int) -> None:
    # Beside 4 the next number is twice as far as the band is past its end.
    error = 2 * error if position == 1 else error
    with pytest.raises(AssertionError, match=f"at flat position {position} .*; 1 elements off"):
        assert_as_near(off_by(error, position), EXACT.float(), EXACT)


def test_twice_the_error_of_eager_precision_passes_and_more_fails() -> None:
    eager = off_by(8 * EPS)
    assert_as_near(off_by(2 * 8 * EPS + BAND), eager, EXACT)
    with pytest.raises(AssertionError, match="1 elements off"):
        assert_as_near(off_by(2 * 8 * EPS + BAND + EPS / 2), eager, EXACT)


def test_slack_is_added_and_no_more() -> None:
    assert_as_near(off_by(BAND + EPS), EXACT.float(), EXACT, slack=EPS)
    with pytest.raises(AssertionError, match="1 elements off"):
        assert_as_near(off_by(BAND + 2 * EPS), EXACT.float(), EXACT, slack=EPS)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("of", ["result", "eager", "exact"])
def test_what_is_not_finite_fails(value: float, of: str) -> None:
    numbers = {"result": EXACT.float(), "eager": EXACT.float(), "exact": EXACT.clone()}
    numbers[of][1] = value
    with pytest.raises(AssertionError, match=f"the {of}.* has NaN or infinite elements"):
        assert_as_near(numbers["result"], numbers["eager"], numbers["exact"])


@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (2,), (1,), (0,), ()])
def test_another_shape_fails(shape: tuple[int, ...]) -> None:
    # Some of them would broadcast.
    with pytest.raises(AssertionError, match="shape"):
        assert_as_near(torch.ones(shape), EXACT.float(), EXACT)
    with pytest.raises(AssertionError, match="shape"):
        assert_as_near(EXACT.float(), torch.ones(shape), EXACT)


def test_integers_and_an_oracle_of_low_precision_fail() -> None:
    with pytest.raises(AssertionError, match="floating-point"):
        assert_as_near(torch.ones(3, dtype=torch.int64), EXACT.float(), EXACT)
    with pytest.raises(AssertionError, match="float64"):
        assert_as_near(EXACT.float(), EXACT.float(), EXACT.float())


def test_the_eager_result_must_have_the_dtype_of_the_other() -> None:
    # In lower precision, the error that it may have would be greater.
    with pytest.raises(AssertionError, match=r"bfloat16.*float32"):
        assert_as_near(EXACT.float(), EXACT.bfloat16(), EXACT)


def test_nothing_is_near_to_nothing() -> None:
    assert_as_near(torch.ones(0), torch.ones(0), torch.ones(0, dtype=torch.float64))


def test_a_formula_must_compute_in_the_dtype_it_is_given() -> None:
    def formula(_: torch.dtype) -> Tensor:
        return EXACT.float()

    with pytest.raises(AssertionError, match="in the dtype it is given"):
        assert_follows(EXACT.float(), formula)
    assert_follows(EXACT.float(), EXACT.to)
    with pytest.raises(AssertionError, match="1 elements off"):
        assert_follows(off_by(2 * BAND), EXACT.to)


@pytest.mark.parametrize(
    "change",
    [
        lambda bits: bits.double(),
        lambda bits: bits[:, None],
        lambda bits: bits.clone().mul_(torch.tensor([1.0, 1.0, -1.0])),
        lambda bits: torch.where(bits.isnan(), 1.0, bits),
    ],
    ids=["dtype", "shape", "sign of zero", "NaN"],
)
def test_other_bits_fail(change: Callable[[Tensor], Tensor]) -> None:
    bits = torch.tensor([1.0, math.nan, 0.0])
    assert_same_bits(bits.clone(), bits)
    with pytest.raises(AssertionError):
        assert_same_bits(change(bits), bits)


def test_sums_in_another_order_pass_and_other_numbers_fail() -> None:
    terms = torch.tensor([1.0, EPS, EPS, -0.5])
    a, b, c, d = terms / 3
    forward, backward = ((a + b) + c) + d, ((d + c) + b) + a
    assert forward != backward
    sizes = terms.abs().sum() / 3
    assert_same_sums(forward, backward, sizes, num_roundings=4)
    allowed = 2 * relative_error(4) * sizes
    for factor, fails in ((0.99, False), (1.01, True)):
        off = torch.tensor([0.0, factor * allowed])
        with pytest.raises(AssertionError, match="1 of 2 sums") if fails else nullcontext():
            assert_same_sums(off, torch.zeros(2), sizes, num_roundings=4)


@pytest.mark.parametrize("other", [torch.zeros(2, 1), torch.zeros(2).double()])
def test_sums_of_another_shape_or_dtype_fail(other: Tensor) -> None:
    with pytest.raises(AssertionError):
        assert_same_sums(other, torch.zeros(2), 1.0, num_roundings=1)


def test_sums_that_are_not_numbers_fail() -> None:
    nothing = torch.tensor([torch.nan, 1.0])
    with pytest.raises(AssertionError, match="1 of 2 sums differ"):
        assert_same_sums(nothing, nothing, 1.0, num_roundings=1)


@pytest.mark.parametrize(("size", "last"), [(None, 4.0), (100.0, 100.0)])
def test_trainings_come_apart_by_as_many_nudges_as_steps(size: float | None, last: float) -> None:
    expected, nudged = [1.0, 4.0], [1.0, 4.0 + NUDGE_UNITS * last * 1e-6]
    allowed = last * (3e-6 + EPS)
    assert_within_drift([1.0, 4.0 + 0.99 * allowed], expected, nudged, num_steps=3, size=size)
    with pytest.raises(AssertionError, match="largest error"):
        assert_within_drift([1.0, 4.0 + 1.01 * allowed], expected, nudged, num_steps=3, size=size)
    with pytest.raises(AssertionError, match="largest error"):
        assert_within_drift([1.0, math.nan], expected, nudged, num_steps=3, size=size)
    with pytest.raises(AssertionError, match="a nudge must change"):
        assert_within_drift(expected, expected, expected, num_steps=3, size=size)


def test_the_error_of_roundings() -> None:
    assert relative_error(0) == 0
    assert EPS / 2 < relative_error(1) < EPS
    assert relative_error(3, torch.float64) < relative_error(3) < relative_error(3, torch.bfloat16)
