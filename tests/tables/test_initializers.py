"""Initial rows: functions of (seed, table, row, column), and distributed as they say."""

import hashlib
import math

import pytest
import torch
from torch import Tensor

from tests.support.tolerance import assert_follows, assert_same_bits
from torchembed import Constant, InPlaceFunction, Normal, Uniform
from torchembed.core.random_bits import random_bits
from torchembed.tables import Initializer, Table, TableSet, TableSpec, shifted_row_key

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DRAWN: list[Initializer] = [Uniform(), Uniform(low=-3.0, high=5.0), Normal(mean=1.0, std=0.5)]
WIDTH = 1 << 64


def mixed(value: int) -> int:
    """SplitMix64's finalizer, in Python's integers."""
    value ^= value >> 30
    value = value * 0xBF58476D1CE4E5B9 % WIDTH
    value ^= value >> 27
    value = value * 0x94D049BB133111EB % WIDTH
    return value ^ value >> 31


def drawn(key: int, counter: int) -> int:
    return mixed((key + (counter + 1) * 0x9E3779B97F4A7C15) % WIDTH)


def fraction(seed: int, name: str, row: int, counter: int) -> float:
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    row_key = drawn(int.from_bytes(digest[:8], "little"), row)
    return (drawn(row_key, counter) >> 40) / (1 << 24)


def rows_of(
    initializer: Initializer,
    num_rows: int = 40,
    dim: int = 6,
    *,
    name: str = "users",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    first_row: int = 0,
    num_local: int | None = None,
    first_column: int = 0,
    num_columns: int | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    spec = TableSpec(
        name=name, num_rows=num_rows, dim=dim, dtype=dtype, initializer=initializer, seed=seed
    )
    table = Table(
        spec,
        first_row=first_row,
        num_rows=num_local,
        first_column=first_column,
        num_columns=num_columns,
    )
    TableSet([table], [None], device)
    return table.parameter.detach()


def test_uniform_rows_are_the_stated_function(device: torch.device) -> None:
    rows = rows_of(Uniform(low=-0.25, high=0.75), seed=-5, name="été", device=device)
    expected = [[-0.25 + fraction(-5, "été", r, c) for c in range(6)] for r in range(40)]
    assert_same_bits(rows, torch.tensor(expected))  # all of it is exact in float32


def test_normal_rows_are_the_stated_function(device: torch.device) -> None:
    rows = rows_of(Normal(mean=3.0, std=2.0), device=device)

    def box_muller(dtype: torch.dtype) -> Tensor:
        shape = (40, 6)
        first, second = (
            torch.tensor(
                [[fraction(0, "users", r, 2 * c + n) for c in range(6)] for r in range(40)]
            )
            .to(dtype)
            .view(shape)
            for n in (0, 1)
        )
        return 3.0 + 2.0 * (-2 * torch.log1p(-first)).sqrt() * torch.cos(2 * math.pi * second)

    assert_follows(rows, box_muller)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("initializer", DRAWN, ids=repr)
def test_rows_do_not_depend_on_shards(
    initializer: Initializer, dtype: torch.dtype, device: torch.device
) -> None:
    whole = rows_of(initializer, dtype=dtype, device=device)
    assert whole.dtype == dtype
    for first_row, num_rows in ((0, 40), (0, 1), (7, 13), (39, 1), (40, 0), (13, 27)):
        shard = rows_of(
            initializer, dtype=dtype, first_row=first_row, num_local=num_rows, device=device
        )
        assert_same_bits(shard, whole[first_row : first_row + num_rows])
    for first_column, num_columns in ((0, 2), (2, 3), (5, 1), (5, None), (0, 6)):
        shard = rows_of(
            initializer,
            dtype=dtype,
            first_column=first_column,
            num_columns=num_columns,
            device=device,
        )
        assert_same_bits(shard, whole[:, first_column:][:, :num_columns])


def test_rows_do_not_depend_on_the_parts_in_which_they_are_filled(device: torch.device) -> None:
    # 2**22 elements are filled at a time.
    num_rows, dim = 2**11 + 3, 2**11
    whole = rows_of(Uniform(), num_rows, dim, device=device)
    part = rows_of(Uniform(), num_rows, dim, first_row=2**11 - 2, device=device)
    assert_same_bits(whole[2**11 - 2 :], part)


@pytest.mark.parametrize("initializer", DRAWN, ids=repr)
def test_rows_do_not_depend_on_groups_or_devices(
    initializer: Initializer, device: torch.device
) -> None:
    specs = [
        TableSpec(name=name, num_rows=rows, dim=dim, initializer=initializer)
        for name, rows, dim in (("a", 9, 4), ("users", 40, 6), ("b", 5, 6))
    ]
    tables = [Table(spec) for spec in specs]
    table_set = TableSet(tables, [None] * 3, device)
    assert len(table_set.groups) == 2
    expected = rows_of(initializer)
    if isinstance(initializer, Uniform):
        assert_same_bits(tables[1].parameter, expected)
    else:  # the logarithm is not the same on every device
        assert_follows(tables[1].parameter, expected.to)


@pytest.mark.parametrize("initializer", DRAWN, ids=repr)
def test_tables_seeds_rows_and_columns_differ(initializer: Initializer) -> None:
    rows = rows_of(initializer)
    for other in (rows_of(initializer, name="users2"), rows_of(initializer, seed=1)):
        assert (rows == other).float().mean() < 0.1
    assert len(set(rows.flatten().tolist())) > 0.9 * rows.numel()


def test_uniform_moments() -> None:
    # Five deviations of the estimates: of the mean, sigma / sqrt(n); of the mean square,
    # sqrt((E x**4 - sigma**4) / n), where sigma**2 = bound**2 / 3 and E x**4 = bound**4 / 5.
    num_rows, dim = 1000, 100
    bound, count = num_rows**-0.5, num_rows * dim
    values = rows_of(Uniform(), num_rows, dim).double()
    assert -bound <= values.min() and values.max() <= bound
    assert abs(values.mean()) < 5 * bound / (3 * count) ** 0.5
    spread = (bound**4 / 5 - bound**4 / 9) ** 0.5 / count**0.5
    assert abs((values**2).mean() - bound**2 / 3) < 5 * spread
    # Counts in 16 equal parts are binomial.
    counts = torch.histc(values, 16, min=-bound, max=bound)
    assert (counts - count / 16).abs().max() < 5 * (count * 15 / 256) ** 0.5


def test_normal_moments() -> None:
    num_rows, dim = 1000, 100
    count = num_rows * dim
    values = (rows_of(Normal(mean=2.0, std=3.0), num_rows, dim).double() - 2.0) / 3.0
    # The deviations of the means of x, x**2, x**3 and x**4 are 1, sqrt(2), sqrt(15), sqrt(96).
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((values**power).mean() - moment) < 5 * (variance / count) ** 0.5


@pytest.mark.parametrize("initializer", DRAWN, ids=repr)
def test_neighbours_are_not_correlated(initializer: Initializer) -> None:
    values = rows_of(initializer, 500, 100).double()
    values = (values - values.mean()) / values.std()
    for first, second in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1])):
        assert abs((first * second).mean()) < 5 / first.numel() ** 0.5


def test_a_shifted_key_draws_what_later_rows_draw() -> None:
    key, rows = 2**63 - 12345, torch.arange(100)
    for shift in (0, 3, -7, 2**40):
        shifted = torch.tensor([shifted_row_key(key, shift)])
        assert torch.equal(
            random_bits(shifted, rows), random_bits(torch.tensor([key]), rows + shift)
        )


def test_constant(device: torch.device) -> None:
    assert_same_bits(rows_of(Constant(value=-2.0), 3, 2, device=device), torch.full((3, 2), -2.0))
    assert rows_of(Constant(), 3, 2).count_nonzero() == 0


def fill_in_place(rows: Tensor) -> None:
    rows.fill_(4.0)


def give_new_rows(rows: Tensor) -> Tensor:
    return torch.full_like(rows, 4.0)


@pytest.mark.parametrize(
    "function", [fill_in_place, give_new_rows, lambda rows: torch.nn.init.constant_(rows, 4.0)]
)
def test_a_function_fills_rows_or_gives_new_ones(function: object, device: torch.device) -> None:
    rows = rows_of(InPlaceFunction(function), 3, 2, device=device)  # type: ignore[arg-type]
    assert_same_bits(rows, torch.full((3, 2), 4.0))
