"""``initialize_rows`` against the initializers of whole tables, and its normal numbers against
float64."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.repeats import assert_repeats
from tests.support.sizes import Sizes
from tests.support.tolerance import DEVIATIONS, assert_as_near, assert_same_bits
from tests.support.tracing import compiled_once
from tests.support.values import normal, not_contiguous
from torchembed.core.random_bits import random_bits, random_uniform
from torchembed.core.types import InitializerKind
from torchembed.ops.initialize_rows import InitialValues, initialize_rows
from torchembed.tables import (
    Constant,
    InitializedTable,
    Initializer,
    InPlaceFunction,
    Normal,
    Uniform,
    initial_values,
)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
IDS = [0, -1, 5, INT64_MIN, INT64_MAX, 2**40 + 3]
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(kw_only=True)
class Case:
    """Rows of a group with three tables, of which some are new, in no order."""

    device: torch.device
    dim: int = 5
    dtype: torch.dtype = torch.float32
    num_rows: int = 12
    initializers: tuple[Initializer, ...] = (Uniform(), Constant(value=0.3), Uniform(low=2, high=9))
    first_column: int = 0

    def __post_init__(self) -> None:
        def on_device(numbers: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(numbers, dtype=dtype, device=self.device)

        self.tables_of_group = [
            InitializedTable(1000 * number - 7, initializer, 50, self.first_column)
            for number, initializer in enumerate(self.initializers)
        ]
        self.values = initial_values(self.tables_of_group, self.device)
        self.rows = on_device([7, 0, -1, 11, 3, 4])
        self.ids = on_device(IDS)
        self.tables = on_device([0, 1, -1, 2, 1, 0], torch.int32)
        self.weight = normal(self.num_rows, self.dim, seed=0, dtype=self.dtype, device=self.device)
        self.states = (
            normal(self.num_rows, self.dim, seed=1, device=self.device),
            normal(self.num_rows, seed=2, device=self.device),
        )

    def expected(self, num_new: int = len(IDS)) -> list[Tensor]:
        """Weight and states afterwards, by the initializers of whole tables."""
        weight, *states = (tensor.clone() for tensor in (self.weight, *self.states))
        for row, id_, number in list(
            zip(self.rows.tolist(), self.ids, self.tables.tolist(), strict=True)
        )[:num_new]:
            if row >= 0:
                table = self.tables_of_group[number]
                table.initializer.fill(
                    weight[row : row + 1],
                    table.key,
                    id_.reshape(1),
                    table.first_column,
                    table.num_rows,
                )
                for state in states:
                    state[row] = 0.25
        return [weight, *states]

    def run(self, num_new: int | None = None) -> list[Tensor]:
        weight, *states = (tensor.clone() for tensor in (self.weight, *self.states))
        count = None if num_new is None else torch.tensor([num_new], device=self.device)
        initialize_rows(
            weight,
            states,
            self.rows,
            self.ids,
            self.tables,
            self.values,
            num_new=count,
            initial_state=0.25,
        )
        return [weight, *states]


def assert_all_same(results: list[Tensor], expected: list[Tensor]) -> None:
    for result, other in zip(results, expected, strict=True):
        assert_same_bits(result, other)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("first_column", [0, 3])
def test_uniform_and_constant_rows_are_those_of_the_initializers(
    dtype: torch.dtype, first_column: int, device: torch.device, sizes: Sizes
) -> None:
    for dim in sizes.dims:
        case = Case(device=device, dim=dim, dtype=dtype, first_column=first_column)
        assert_all_same(case.run(), case.expected())


@pytest.mark.parametrize("num_new", [0, 1, 4, 6])
def test_entries_from_num_new_on_change_nothing(num_new: int, device: torch.device) -> None:
    case = Case(device=device)
    assert_all_same(case.run(num_new), case.expected(num_new))


def test_a_row_that_is_longer_than_a_block_of_columns(device: torch.device) -> None:
    case = Case(device=device, dim=2100)
    assert_all_same(case.run(), case.expected())


@pytest.mark.parametrize("value", [-0.0, math.inf, 1e-45, 60000.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_constants_keep_their_bits(value: float, dtype: torch.dtype, device: torch.device) -> None:
    case = Case(device=device, dtype=dtype, initializers=(Constant(value=value),) * 3)
    assert_all_same(case.run(), case.expected())


def normal_case(
    device: torch.device, num_rows: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The ids of a table, and their normal rows with mean 0.5 and standard deviation 3."""
    ids = torch.arange(num_rows, device=device) - num_rows // 2
    weight = torch.empty(num_rows, dim, dtype=dtype, device=device)
    table = InitializedTable(11, Normal(mean=0.5, std=3.0), num_rows)
    rows = torch.arange(num_rows, device=device)
    tables = torch.zeros(num_rows, dtype=torch.int32, device=device)
    initialize_rows(weight, (), rows, ids, tables, initial_values([table], device))
    return ids, weight


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_rows_are_near_the_exact_numbers(
    dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> None:
    num_rows = sizes.num_parallel_ids // 16
    ids, weight = normal_case(device, num_rows, 16, dtype)
    eager = torch.empty_like(weight)
    Normal(mean=0.5, std=3.0).fill(eager, 11, ids, 0, num_rows)

    keys = random_bits(torch.full((1,), 11), ids.cpu()).unsqueeze(1)
    columns = torch.arange(16)
    radius = (-2 * torch.log1p(-random_uniform(keys, 2 * columns).double())).sqrt()
    turns = random_uniform(keys, 2 * columns + 1).double()
    exact = 0.5 + 3.0 * radius * torch.cos(2 * math.pi * turns)
    assert_as_near(weight, eager, exact)


def test_normal_rows_have_the_same_bits_in_every_lane(device: torch.device) -> None:
    _, weight = normal_case(device, 64, 16)
    bits = weight.flatten().cpu().view(torch.int32).long()
    assert bits[:4].tolist() == [-1069880646, -1081446062, -1068806758, 1048517036]
    assert int((bits * torch.arange(1, bits.numel() + 1)).sum()) == 105041914035519


def test_normal_numbers_are_normal(device: torch.device, sizes: Sizes) -> None:
    _, weight = normal_case(device, sizes.num_parallel_ids // 8, 8)
    drawn = (weight.double() - 0.5) / 3.0
    num_drawn = drawn.numel()
    # The variances of the means of x, x**2, x**3 and x**4 are 1, 2, 15 and 96 over their number.
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = abs(float((drawn**power).mean()) - mean)
        assert error < DEVIATIONS * math.sqrt(variance / num_drawn)


def test_inputs_need_not_be_contiguous(device: torch.device) -> None:
    case = Case(device=device)
    expected = case.run()
    case.rows, case.ids, case.tables = map(not_contiguous, (case.rows, case.ids, case.tables))
    assert_all_same(case.run(), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_may_lie_apart(dtype: torch.dtype, device: torch.device) -> None:
    """Those of the weight and of both states, with others between them that stay."""
    case = Case(device=device, dtype=dtype)
    expected = case.run()

    def spread(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, torch.full_like(tensor, 7)], dim=1)

    whole = [spread(tensor) for tensor in (case.weight, *case.states)]
    case.weight, *states = (tensor[:, 0] for tensor in whole)
    case.states = tuple(states)
    new = case.rows, case.ids, case.tables, case.values
    initialize_rows(case.weight, case.states, *new, initial_state=0.25)
    for tensor, wanted in zip(whole, expected, strict=True):
        assert torch.equal(tensor[:, 0], wanted)
        assert torch.equal(tensor[:, 1], torch.full_like(wanted, 7))


@pytest.mark.parametrize(("num_entries", "dim"), [(0, 5), (6, 0)])
def test_nothing_to_write(num_entries: int, dim: int, device: torch.device) -> None:
    case = Case(device=device, dim=dim)
    case.rows, case.ids, case.tables = (
        tensor[:num_entries] for tensor in (case.rows, case.ids, case.tables)
    )
    assert_all_same(case.run(), [case.weight, *case.states])


def large_case(device: torch.device, num_rows: int) -> Case:
    initializers = (Uniform(), Normal(), Constant(value=2))
    case = Case(device=device, dim=16, num_rows=num_rows, initializers=initializers)
    case.rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).to(device)
    case.ids = torch.arange(num_rows, device=device)
    case.tables = (case.ids % 3).int()
    return case


def test_repeats_its_bits(device: torch.device, sizes: Sizes) -> None:
    case = large_case(device, sizes.num_parallel_ids)
    assert_repeats(case.run)


def test_opcheck(device: torch.device) -> None:
    case = Case(device=device)
    count = torch.tensor([4], device=device)
    ids = (case.rows, case.ids, case.tables)
    op = torch.ops.torchembed.initialize_rows.default
    torch.library.opcheck(op, (case.weight, *case.states, *ids, count, *case.values, 0.0))
    torch.library.opcheck(op, (case.weight, None, None, *ids, None, *case.values, 0.0))


def test_compiles_whole_and_once_for_every_size(device: torch.device) -> None:
    def run(weight: Tensor, rows: Tensor, ids: Tensor, tables: Tensor) -> Tensor:
        initialize_rows(weight, (), rows, ids, tables, values)
        return weight + 1

    values = large_case(device, 1).values
    compiled = compiled_once(run)
    for num_rows in (4, 7, 11):
        case = large_case(device, num_rows)
        arguments = (case.rows, case.ids, case.tables)
        result = compiled(case.weight.clone(), *arguments)
        assert_same_bits(result, run(case.weight.clone(), *arguments))


def test_the_values_of_tables(device: torch.device) -> None:
    tables = [
        InitializedTable(-3, Uniform(), 16),
        InitializedTable(4, Normal(mean=1.0, std=0.5), 9, first_column=8),
        InitializedTable(5, Constant(value=7.0), 9),
    ]
    values = initial_values(tables, device)
    assert values.table_keys.tolist() == [-3, 4, 5]
    assert values.kinds.tolist() == [
        InitializerKind.UNIFORM,
        InitializerKind.NORMAL,
        InitializerKind.CONSTANT,
    ]
    assert values.parameters.tolist() == [[-0.25, 0.5], [1.0, 0.5], [7.0, 0.0]]
    assert values.first_columns is not None and values.first_columns.tolist() == [0, 8, 0]
    assert initial_values(tables[::2], device).first_columns is None


def test_refuses_initializers_that_are_no_function_of_the_id(device: torch.device) -> None:
    table = InitializedTable(1, InPlaceFunction(torch.zero_), 4)
    message = r"must be Uniform, Normal or Constant, .*, got InPlaceFunction$"
    with pytest.raises(TypeError, match=message):
        initial_values([table], device)


ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "rows dtype": (
        TypeError,
        r"^rows must be int64, got int32; call \.to\(torch\.int64\)$",
        {"rows": torch.zeros(6, dtype=torch.int32)},
    ),
    "ids length": (
        ValueError,
        r"^ids must hold 6 elements \(one for each row\), got 5$",
        {"ids": torch.zeros(5, dtype=torch.int64)},
    ),
    "tables dtype": (TypeError, r"^tables must be int32", {"tables": torch.zeros(6).long()}),
    "state dtype": (
        TypeError,
        r"^state0 must be float32, got float64; call \.float\(\)$",
        {"states": (torch.zeros(12, 5).double(),)},
    ),
    "state shape": (
        ValueError,
        r"^state1 must have shape \(12, 5\) or \(12,\), .*, got \(5,\)$",
        {"states": (torch.zeros(12), torch.zeros(5))},
    ),
    "number of states": (
        ValueError,
        r"^states must be two tensors at most, got 3$",
        {"states": (torch.zeros(12),) * 3},
    ),
    "weight dtype": (TypeError, r"^weight must be float32", {"weight": torch.zeros(12, 5).int()}),
    "weight layout": (
        ValueError,
        (
            r"^weight must have contiguous rows that do not overlap, got shape \(12, 5\) and "
            r"strides \(1, 12\); call \.contiguous\(\)$"
        ),
        {"weight": torch.zeros(5, 12).T},
    ),
    "state layout": (
        ValueError,
        (
            r"^state0 must have contiguous rows that do not overlap, got shape \(12,\) and strides "
            r"\(0,\)"
        ),
        {"states": (torch.zeros(1).expand(12),)},
    ),
    "num_new": (ValueError, r"^num_new must hold 1 elements", {"num_new": torch.tensor([1, 2])}),
    "device": (
        ValueError,
        r"^ids must be on cpu as rows is, got meta; call \.to\('cpu'\)$",
        {"ids": torch.zeros(6, dtype=torch.int64, device="meta")},
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_refuses_what_does_not_fit(case: str) -> None:
    error, message, changes = ERRORS[case]
    fitting = Case(device=torch.device("cpu"))
    arguments: dict[str, Any] = {
        "weight": fitting.weight,
        "states": (),
        "rows": fitting.rows,
        "ids": fitting.ids,
        "tables": fitting.tables,
        "values": fitting.values,
    } | changes
    with pytest.raises(error, match=message):
        initialize_rows(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": torch.zeros(2, dtype=torch.int32)}, r"^kinds must hold 3 elements"),
        ({"parameters": torch.zeros(6)}, r"^parameters must have shape \(3, 2\)"),
        ({"first_columns": torch.zeros(1).long()}, r"^first_columns must hold 3 elements"),
    ],
)
def test_refuses_values_of_another_number_of_tables(
    changes: dict[str, Tensor], message: str
) -> None:
    case = Case(device=torch.device("cpu"))
    case.values = InitialValues(**(case.values._asdict() | changes))
    with pytest.raises(ValueError, match=message):
        case.run()
