"""Stochastic rounding of 16-bit rows: its exact bits, that it is unbiased, and what it leaves."""

import math

import pytest
import torch
from torch import Tensor

from tests.support import lanes, oracle
from tests.support.repeats import assert_repeats
from tests.support.row_updates import scalar
from tests.support.sizes import Sizes
from tests.support.tolerance import assert_same_bits
from tests.support.values import normal
from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import RoundingKeys, RowGradients, UpdateRule, rowwise_update
from torchembed.ops.segments import find_runs
from torchembed.tables import shifted_row_key

HALVES = (torch.float16, torch.bfloat16)
# Three tables of 3, 0 and 4 rows.
ROW_OFFSETS = (0, 3, 3, 7)
ROW_KEYS = (5, 6, -7_000_000_000_000_000_000)


def rounding_keys(device: torch.device) -> RoundingKeys:
    return RoundingKeys(
        torch.tensor(ROW_OFFSETS, device=device), torch.tensor(ROW_KEYS, device=device)
    )


def rounded(
    values: Tensor,
    dtype: torch.dtype,
    step: int,
    device: torch.device,
    rounding: RoundingKeys | None = None,
) -> Tensor:
    """``values [R, D]`` as an update stores zeros - (-1) * values: nothing else rounds them."""
    num_rows = values.shape[0]
    weight = torch.zeros(values.shape, dtype=dtype, device=device)
    runs = find_runs(torch.arange(num_rows, device=device), num_rows)
    rowwise_update(
        weight,
        (),
        runs,
        RowGradients(values.to(device)),
        UpdateRule(kind=OptimizerKind.SGD),
        scalar(-1.0, device),
        step=scalar(step, device),
        rounding=rounding or rounding_keys(device),
    )
    return weight


def expected(values: Tensor, dtype: torch.dtype, step: int) -> Tensor:
    """The same in Python integers and fractions."""
    result = torch.empty(values.shape, dtype=dtype)
    for row in range(values.shape[0]):
        table = max(t for t, first in enumerate(ROW_OFFSETS[:-1]) if first <= row)
        row_key = oracle.random_bits(ROW_KEYS[table], row)
        step_key = oracle.random_bits(row_key, step)
        for column in range(values.shape[1]):
            # Four columns share 64 bits.
            bits = oracle.random_bits(step_key, column // 4) << 16 * (column % 4) & (1 << 64) - 1
            value = values[row, column].item()
            result[row, column] = oracle.stochastic_round(value, dtype, bits)
    return result


@pytest.mark.parametrize("step", [1, 2, 16_777_216])
@pytest.mark.parametrize("dim", [1, 5, 32, 40])
@pytest.mark.parametrize("dtype", HALVES)
def test_gives_the_bits_that_integers_give(
    dtype: torch.dtype, dim: int, step: int, device: torch.device
) -> None:
    values = normal(7, dim, seed=step)
    assert_same_bits(rounded(values, dtype, step, device), expected(values, dtype, step))


# Triton's interpreter computes in numpy, which warns.
numpy_may_overflow = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@numpy_may_overflow
@pytest.mark.parametrize("dtype", HALVES)
def test_the_bits_of_small_and_large_numbers(dtype: torch.dtype, device: torch.device) -> None:
    exponents = torch.arange(-30.0, 18.0).expand(7, 48)
    values = (1 + normal(7, 48, seed=0).abs() % 1) * 2**exponents
    values[::2] *= -1
    assert_same_bits(rounded(values, dtype, 3, device), expected(values, dtype, 3))


def test_the_bits_of_bfloat16_at_both_ends(device: torch.device) -> None:
    largest = torch.finfo(torch.float32).max
    ends = torch.tensor([1e-38, 3e-39, -1e-40, 2e-45, 3.38e38, -3.3e38, largest])
    values = ends.repeat(7, 1)
    result = rounded(values, torch.bfloat16, 3, device).float().cpu()
    wanted = expected(values, torch.bfloat16, 3).float()
    # Processors may flush numbers below the smallest normal one to zero.
    normal_numbers = values.abs() >= torch.finfo(torch.float32).tiny
    assert torch.equal(result[normal_numbers], wanted[normal_numbers])


@numpy_may_overflow
def test_numbers_near_the_largest_float16(device: torch.device) -> None:
    values = torch.tensor([65504.0, 65505.0, 65519.0, 65519.99, -65519.0]).repeat(7, 1)
    nearest = values.half()
    assert torch.isfinite(nearest).all()
    assert_same_bits(rounded(values, torch.float16, 1, device), nearest)
    beyond = torch.tensor([65536.0, -1e6, 3e38]).repeat(7, 1)
    assert_same_bits(rounded(beyond, torch.float16, 1, device), beyond.half())
    # From 65520 on the nearest is infinite; the neighbour towards zero is not.
    between = torch.full((7, 64), 65530.0)
    result = rounded(between, torch.float16, 1, device)
    assert_same_bits(result, expected(between, torch.float16, 1))
    assert {65504.0, math.inf} == set(result.flatten().tolist())


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_not_finite_stays(dtype: torch.dtype, device: torch.device) -> None:
    # NaNs whose bits are all ones too: noise must not carry them over to numbers.
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([math.inf, -math.inf]), nans]).repeat(7, 1)
    result = rounded(values, dtype, 1, device).float().cpu()
    assert torch.equal(result[:, :2], values[:, :2])
    assert torch.isnan(result[:, 2:]).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_exact_numbers_stay_in_every_step(dtype: torch.dtype, device: torch.device) -> None:
    # All 2**16 of them but the NaNs, in an update by gradients of zero.
    weight = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    weight = weight[~torch.isnan(weight)]
    if lanes.is_interpreted():
        weight = weight[::61].clone()
    num_rows = 2
    weight = weight[: weight.numel() // num_rows * num_rows].view(num_rows, -1).to(device)
    original = weight.clone()
    runs = find_runs(torch.arange(num_rows, device=device), num_rows)
    for step in (1, 2, 3):
        rowwise_update(
            weight,
            (),
            runs,
            RowGradients(torch.zeros(weight.shape, device=device)),
            UpdateRule(kind=OptimizerKind.SGD),
            scalar(0.1, device),
            step=scalar(step, device),
            rounding=rounding_keys(device),
        )
        assert_same_bits(weight, original)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.bfloat16, 1.0 + 2.0**-9),
        (torch.bfloat16, -3.0 - 2.0**-14),
        (torch.bfloat16, 1e-20),
        (torch.float16, 1.0 + 2.0**-12),
        (torch.float16, -3.0 - 2.0**-19),
        (torch.float16, 2.0**-15 + 2.0**-26),
        (torch.float16, -1e-8),
    ],
)
def test_is_unbiased(dtype: torch.dtype, value: float, device: torch.device, sizes: Sizes) -> None:
    num_draws = 7 * 512
    value = torch.tensor(value).item()
    draws = rounded(torch.full((7, 512), value), dtype, 4, device).double().cpu()
    neighbours = sorted(set(draws.flatten().tolist()))
    assert len(neighbours) == 2
    low, high = neighbours
    assert low < value < high
    # Hoeffding: the mean of so many draws is off by more than this once in 10**9 times.
    bound = (high - low) * math.sqrt(math.log(2e9) / (2 * num_draws))
    assert abs(draws.mean().item() - value) < bound


@pytest.mark.parametrize("dtype", HALVES)
def test_draws_differ_from_row_to_row_and_step_to_step(
    dtype: torch.dtype, device: torch.device
) -> None:
    halfway = torch.full((7, 64), 1.0 + torch.finfo(dtype).eps / 2)
    first, second = (rounded(halfway, dtype, step, device) > 1 for step in (1, 2))
    patterns = [tuple(row) for draws in (first, second) for row in draws.tolist()]
    assert len(set(patterns)) == 14
    assert_same_bits(rounded(halfway, dtype, 1, device), rounded(halfway, dtype, 1, device))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_row_draws_the_same_wherever_its_table_stands(
    dtype: torch.dtype, device: torch.device
) -> None:
    values = normal(5, 16, seed=0)
    key = 1234

    def in_group(first_row: int, first: int, last: int) -> Tensor:
        """Rows [first, last) of the table, held from row ``first_row`` of a group on."""
        padded = torch.zeros(first_row + last - first + 1, 16)
        padded[first_row:-1] = values[first:last]
        keys = RoundingKeys(
            torch.tensor([0, first_row, padded.shape[0] - 1, padded.shape[0]], device=device),
            torch.tensor([9, shifted_row_key(key, first - first_row), 8], device=device),
        )
        return rounded(padded, dtype, 6, device, keys)[first_row:-1]

    whole = in_group(0, 0, 5)
    assert_same_bits(in_group(4, 0, 5), whole)
    assert_same_bits(torch.cat([in_group(1, 0, 2), in_group(3, 2, 5)]), whole)


@pytest.mark.parametrize("dim", [8, 40])
@pytest.mark.parametrize("first", [5, 6, 7])
@pytest.mark.parametrize("dtype", HALVES)
def test_columns_draw_the_same_wherever_they_are_held(
    dtype: torch.dtype, first: int, dim: int, device: torch.device
) -> None:
    values = normal(7, 16 + dim, seed=0)
    whole = rounded(values, dtype, 6, device)
    first_columns = torch.tensor([first, 0, 16], device=device)
    keys = rounding_keys(device)._replace(first_columns=first_columns)
    part = torch.cat([values[:3, first : first + dim], values[3:, 16:]])
    result = rounded(part, dtype, 6, device, keys)
    assert_same_bits(result[:3], whole[:3, first : first + dim])
    assert_same_bits(result[3:], whole[3:, 16:])


@pytest.mark.parametrize("kind", list(OptimizerKind))
@pytest.mark.parametrize("dtype", HALVES)
def test_each_rule_rounds_to_a_neighbour_and_repeats(
    dtype: torch.dtype,
    kind: OptimizerKind,
    device: torch.device,
    sizes: Sizes,
    fastest_algorithms: None,
) -> None:
    rule = UpdateRule(kind=kind, weight_decay=0.01)
    rows = torch.arange(7, device=device).repeat(sizes.num_parallel_ids // 70 + 1)
    grad = normal(rows.numel(), 24, seed=0, device=device)

    def update(dtype: torch.dtype, rounding: RoundingKeys | None) -> Tensor:
        weight = normal(7, 24, seed=1).to(dtype).to(device)
        start = weight.to(torch.float32 if rounding is None else dtype)
        shape = rule.state_shape(7, 24)
        states = tuple(torch.zeros(shape, device=device) for _ in range(rule.num_states))
        rowwise_update(
            start,
            states,
            find_runs(rows, 7),
            RowGradients(grad),
            rule,
            scalar(0.1, device),
            step=scalar(1, device),
            rounding=rounding,
        )
        return start

    unrounded = update(dtype, None)
    result = update(dtype, rounding_keys(device))
    distance = (result.float() - unrounded).abs()
    finfo = torch.finfo(dtype)
    assert (distance <= finfo.eps * unrounded.abs() + finfo.smallest_normal * finfo.eps).all()
    assert (result != unrounded.to(dtype)).any()
    assert_repeats(lambda: (update(dtype, rounding_keys(device)),))
