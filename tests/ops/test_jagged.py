"""Permuting features and splitting ids by row range, against plain Python."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support import lanes
from tests.support.bags import EDGE_CASES, Bags, random_jagged
from tests.support.repeats import assert_repeats
from tests.support.sizes import Sizes
from tests.support.tolerance import assert_follows, assert_same_bits
from tests.support.values import normal, not_contiguous
from torchembed.ops.jagged import bucketize_rows, permute_features

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
IDS = (torch.int32, torch.int64)
JAGGED_CASES = {name: bags for name, bags in EDGE_CASES.items() if bags.hotness is None}
OPS = (
    "permute_features_forward",
    "permute_features_backward",
    "bucketize_rows",
)
ONE_PER_FUNCTION = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def positions_of_bags(bags: Bags) -> list[list[int]]:
    """The positions that each bag holds."""
    ends = [0, *itertools.accumulate(bags.lengths)]
    return [list(range(first, last)) for first, last in itertools.pairwise(ends)]


def spare_positions(bags: Bags) -> list[int]:
    return list(range(sum(bags.lengths), bags.rows.numel()))


class Arranged(NamedTuple):
    """The elements that a result must hold: for each of its positions one of the batch, None where
    spare."""

    sources: list[int | None]
    lengths: list[int]

    def of(self, tensor: Tensor, spare: float = 0) -> list[float]:
        values = tensor.tolist()
        return [spare if source is None else values[source] for source in self.sources]

    def offsets(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]

    def gradient(self, grad: Tensor, num_ids: int) -> Tensor:
        total = grad.new_zeros(num_ids)
        for position, source in enumerate(self.sources):
            if source is not None:
                total[source] += grad[position]
        return total


def permuted(bags: Bags, permutation: Sequence[int], num_ids: int) -> Arranged:
    held = positions_of_bags(bags)
    size = bags.batch_size
    chosen = [held[feature * size + b] for feature in permutation for b in range(size)]
    sources: list[int | None] = [position for bag in chosen for position in bag]
    sources += [None] * (num_ids - len(sources))
    return Arranged(sources, [len(bag) for bag in chosen])


@pytest.mark.parametrize("op", OPS)
def test_the_lane_runs_its_kernels(op: str, device: torch.device) -> None:
    lane = lanes.required_lane()
    if lane is None:
        pytest.skip("TORCHEMBED_LANE requires no lane, so any kernel will do")
    # There is no C++ kernel: beside those of other operations, torch's own run.
    assert lanes.picked_kernel(op, device) == ("reference" if lane == "native" else lane)


def check_permute(
    bags: Bags,
    permutation: Sequence[int],
    device: torch.device,
    *,
    spare: int = 0,
    dtype: torch.dtype = torch.float32,
    ids_dtype: torch.dtype = torch.int64,
    offsets_dtype: torch.dtype = torch.int64,
) -> None:
    num_ids = sum(permuted(bags, permutation, 0).lengths) + spare
    expected = permuted(bags, permutation, num_ids)
    values, offsets = bags.rows.to(device, ids_dtype), bags.offsets.to(device, offsets_dtype)
    weights = normal(values.numel(), seed=5, dtype=dtype, device=device).requires_grad_()
    result = permute_features(
        values,
        offsets,
        permutation,
        num_features=bags.num_features,
        batch_size=bags.batch_size,
        num_ids=num_ids,
        weights=weights,
    )
    assert result.values.dtype == ids_dtype and result.values.tolist() == expected.of(values)
    assert result.offsets.dtype == offsets_dtype
    assert result.offsets.tolist() == expected.offsets()
    assert result.weights is not None and result.weights.dtype == dtype
    assert result.weights.tolist() == expected.of(weights)
    assert not result.values.requires_grad and not result.offsets.requires_grad

    grad = normal(num_ids, seed=6, dtype=dtype, device=device)
    (actual,) = torch.autograd.grad(result.weights, weights, grad)
    assert actual.dtype == dtype
    count = values.numel()
    assert_follows(actual, lambda exact: expected.gradient(grad.cpu().to(exact), count))


@pytest.mark.parametrize("case", JAGGED_CASES)
def test_permute_edge_cases(case: str, device: torch.device) -> None:
    bags = JAGGED_CASES[case]
    last = bags.num_features - 1
    check_permute(bags, range(last, -1, -1), device)
    check_permute(bags, range(last, -1, -1), device, spare=2)
    check_permute(bags, [], device, spare=1)
    if last >= 0:
        check_permute(bags, [last, 0, last], device)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("permutation", [[2, 0, 1], [0, 0, 2, 0], [1], [2, 2], []], ids=str)
def test_permute(
    permutation: list[int], dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> None:
    bags = random_jagged(3, sizes.batch_size, sizes.num_rows, max_length=sizes.max_length)
    check_permute(bags, permutation, device, dtype=dtype)


@pytest.mark.parametrize("ids_dtype", IDS)
@pytest.mark.parametrize("offsets_dtype", IDS)
def test_permute_keeps_integer_dtypes(
    ids_dtype: torch.dtype, offsets_dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> None:
    bags = random_jagged(3, sizes.batch_size, sizes.num_rows)
    check_permute(bags, [2, 0, 0], device, ids_dtype=ids_dtype, offsets_dtype=offsets_dtype)


def test_permute_spans_several_blocks(device: torch.device) -> None:
    check_permute(random_jagged(4, 70, 50, max_length=11), [3, 1, 0, 2, 1], device, spare=600)


def test_permute_worked_example(device: torch.device) -> None:
    values = torch.tensor([7, 8, 9], device=device)
    offsets = torch.tensor([0, 1, 1, 3], device=device)
    result = permute_features(values, offsets, [2, 1, 0], num_features=3, batch_size=1)
    assert result.values.tolist() == [8, 9, 7]
    assert result.offsets.tolist() == [0, 2, 2, 3]
    assert result.weights is None


def test_a_permutation_needs_no_count_and_keeps_spare_capacity(device: torch.device) -> None:
    values = torch.tensor([7, 8, 9, 5, 5], device=device)
    offsets = torch.tensor([0, 1, 3], device=device)
    result = permute_features(values, offsets, [1, 0], num_features=2, batch_size=1)
    assert result.values.tolist() == [8, 9, 7, 0, 0]
    assert result.offsets.tolist() == [0, 2, 3]


def test_floating_values_are_permuted_with_their_gradient(device: torch.device) -> None:
    values = torch.tensor([7.0, 8.0, 9.0], device=device, requires_grad=True)
    offsets = torch.tensor([0, 1, 3], device=device)
    result = permute_features(values, offsets, [1, 0, 1], num_features=2, batch_size=1, num_ids=5)
    assert result.values.tolist() == [8.0, 9.0, 7.0, 8.0, 9.0]
    grad = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], device=device)
    (actual,) = torch.autograd.grad(result.values, values, grad)
    assert actual.tolist() == [4.0, 9.0, 18.0]


BOUNDARIES = {
    "one_bucket": [0, 5],
    "even": [0, 2, 4, 6],
    "uneven": [0, 1, 6],
    "empty_ranges": [0, 0, 2, 2, 5, 5],
    "from_three": [3, 4, 5],
    "all_empty": [2, 2, 2],
    "beyond_32_bits": [-(2**40), 2, 2**40],
}


def bucketized(bags: Bags, boundaries: list[list[int]]) -> tuple[Arranged, list[int]]:
    """The places that ids go to, and what each becomes."""
    rows = bags.rows.tolist()
    num_buckets = len(boundaries[0]) - 1 if boundaries else 1
    chosen: list[list[int]] = [[] for _ in range(num_buckets * len(bags.lengths))]
    local = [-1] * len(rows)
    for bag, positions in enumerate(positions_of_bags(bags)):
        ranges = list(itertools.pairwise(boundaries[bag // bags.batch_size]))
        not_empty = [bucket for bucket, (first, end) in enumerate(ranges) if first < end]
        for position in positions:
            bucket = not_empty[0] if not_empty else num_buckets - 1
            for candidate, (first, end) in enumerate(ranges):
                if first <= rows[position] < end:
                    bucket, local[position] = candidate, rows[position] - first
            chosen[bucket * len(bags.lengths) + bag].append(position)
    sources = [position for bag in chosen for position in bag] + spare_positions(bags)
    return Arranged(list(sources), [len(bag) for bag in chosen]), local


def check_bucketize(
    bags: Bags,
    boundaries: list[list[int]],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    ids_dtype: torch.dtype = torch.int64,
    offsets_dtype: torch.dtype = torch.int64,
) -> None:
    expected, local = bucketized(bags, boundaries)
    values, offsets = bags.rows.to(device, ids_dtype), bags.offsets.to(device, offsets_dtype)
    weights = normal(values.numel(), seed=5, dtype=dtype, device=device).requires_grad_()
    ranges = torch.tensor(boundaries or [[0, 0]], device=device)[: bags.num_features]
    result = bucketize_rows(values, offsets, ranges, batch_size=bags.batch_size, weights=weights)
    assert result.values.dtype == ids_dtype
    assert result.values.tolist() == expected.of(torch.tensor(local))
    assert result.offsets.dtype == offsets_dtype
    assert result.offsets.tolist() == expected.offsets()
    assert result.weights is not None and result.weights.tolist() == expected.of(weights)
    assert result.positions.dtype == torch.int32
    inverse = {source: place for place, source in enumerate(expected.sources)}
    assert result.positions.tolist() == [inverse[p] for p in range(values.numel())]

    grad = normal(values.numel(), seed=6, dtype=dtype, device=device)
    (actual,) = torch.autograd.grad(result.weights, weights, grad)
    assert_same_bits(actual, expected.gradient(grad.cpu(), values.numel()))


@pytest.mark.parametrize("case", JAGGED_CASES)
def test_bucketize_edge_cases(case: str, device: torch.device) -> None:
    bags = JAGGED_CASES[case]
    check_bucketize(bags, [[0, 2, 4]] * bags.num_features, device)


@pytest.mark.parametrize("name", BOUNDARIES)
def test_bucketize_by_any_boundaries(name: str, device: torch.device) -> None:
    bags = random_jagged(2, 6, 8, max_length=5, missing=0.2)
    check_bucketize(bags, [BOUNDARIES[name]] * 2, device)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ids_dtype", IDS)
@pytest.mark.parametrize("offsets_dtype", IDS)
def test_bucketize_takes_every_dtype(
    dtype: torch.dtype,
    ids_dtype: torch.dtype,
    offsets_dtype: torch.dtype,
    device: torch.device,
    sizes: Sizes,
) -> None:
    bags = random_jagged(3, sizes.batch_size, sizes.num_rows, max_length=sizes.max_length)
    ends = [[0, 3, 7, 20], [0, 10, 11, 12], [0, 0, 5, sizes.num_rows]]
    check_bucketize(
        bags, ends, device, dtype=dtype, ids_dtype=ids_dtype, offsets_dtype=offsets_dtype
    )


def test_bucketize_spans_several_blocks(device: torch.device) -> None:
    bags = random_jagged(3, 80, 100, max_length=11)
    check_bucketize(bags, [list(range(0, 101, 10))] * 3, device)


def test_bucketize_worked_example(device: torch.device) -> None:
    result = bucketize_rows(
        torch.tensor([5, 0, 9, 3], device=device),
        torch.tensor([0, 3, 4], device=device),
        torch.tensor([[0, 4, 8]], device=device),
        batch_size=2,
    )
    assert result.values.tolist() == [0, -1, 3, 1]
    assert result.offsets.tolist() == [0, 2, 3, 4, 4]
    assert result.positions.tolist() == [3, 0, 1, 2]
    assert result.weights is None


@settings(max_examples=25, suppress_health_check=ONE_PER_FUNCTION)
@given(data=st.data())
def test_no_id_is_lost(data: st.DataObject, device: torch.device) -> None:
    """Every id is found again through its position, whatever the boundaries are."""
    num_features = data.draw(st.integers(1, 3))
    num_buckets = data.draw(st.integers(1, 4))
    bags = random_jagged(
        num_features, data.draw(st.integers(1, 4)), 12, seed=data.draw(st.integers(0, 99))
    )
    edges = st.lists(st.integers(-3, 15), min_size=num_buckets + 1, max_size=num_buckets + 1)
    boundaries = [sorted(data.draw(edges)) for _ in range(num_features)]
    check_bucketize(bags, boundaries, device)


def jagged_arguments(bags: Bags, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, offsets, boundaries in three buckets, and weights."""
    ranges = torch.tensor([[0, 4, 9, bags.num_rows]] * bags.num_features, device=device)
    weights = normal(bags.rows.numel(), seed=3, device=device)
    return bags.rows.to(device), bags.offsets.to(device), ranges, weights


def every_result(
    values: Tensor, offsets: Tensor, ranges: Tensor, weights: Tensor, batch_size: int
) -> list[Tensor]:
    """The result of each operation on one batch; ``weights`` take part in all."""
    grouping = {"num_features": ranges.shape[0], "batch_size": batch_size}
    num_ids = values.shape[0]
    swapped = permute_features(values, offsets, [1, 0], **grouping, weights=weights)
    repeated = permute_features(
        values, offsets, [1, 1], **grouping, num_ids=2 * num_ids, weights=weights
    )
    split = bucketize_rows(values, offsets, ranges, batch_size=batch_size, weights=weights)
    return [*swapped, *repeated, *split]


def with_gradient(
    function: Callable[..., list[Tensor]], tensors: Sequence[Tensor], batch_size: int
) -> list[Tensor]:
    *integers, weights = tensors
    leaf = weights.detach().clone().requires_grad_()
    outputs = function(*integers, leaf, batch_size)
    total = sum(output.square().sum() for output in outputs if output.requires_grad)
    return [*outputs, torch.autograd.grad(total, leaf)[0]]


def test_inputs_need_not_be_contiguous(device: torch.device, sizes: Sizes) -> None:
    bags = random_jagged(2, sizes.batch_size, sizes.num_rows)
    tensors = jagged_arguments(bags, device)
    expected = with_gradient(every_result, tensors, bags.batch_size)

    def strided(*arguments: Any) -> list[Tensor]:
        *given, batch_size = arguments
        return every_result(*(not_contiguous(tensor) for tensor in given), batch_size)

    for actual, same in zip(
        with_gradient(strided, tensors, bags.batch_size), expected, strict=True
    ):
        assert_same_bits(actual, same)


def test_repeats_its_bits(device: torch.device, fastest_algorithms: None) -> None:
    bags = random_jagged(2, 90, 40, max_length=12)
    tensors = jagged_arguments(bags, device)
    assert_repeats(lambda: with_gradient(every_result, tensors, bags.batch_size))


def test_no_gradient_is_read_of_ids_that_did_not_fit(device: torch.device) -> None:
    """Two of three ids fit; what lies behind their gradients in memory is none."""
    memory = torch.tensor([5.0, 6.0, math.nan], device=device)
    offsets = torch.tensor([0, 1, 3], device=device)
    grad = torch.ops.torchembed.permute_features_backward(
        memory[:2], offsets, offsets, [0, 1], 2, 1, 3
    )
    assert grad.tolist() == [5, 6, 0]


def test_opcheck(device: torch.device, sizes: Sizes) -> None:
    bags = random_jagged(2, sizes.batch_size, sizes.num_rows)
    values, offsets, ranges, weights = jagged_arguments(bags, device)
    num_ids, size = values.numel(), bags.batch_size
    ops = torch.ops.torchembed
    for given_weights in (None, weights):
        torch.library.opcheck(
            ops.permute_features_forward.default,
            (values, offsets, given_weights, [1, 0], 2, size, num_ids),
        )
        torch.library.opcheck(
            ops.bucketize_rows.default, (values, offsets, given_weights, ranges, size)
        )
    new_offsets = permute_features(values, offsets, [1, 0], num_features=2, batch_size=size).offsets
    torch.library.opcheck(
        ops.permute_features_backward.default,
        (weights, offsets, new_offsets, [1, 0], 2, size, num_ids),
    )


def test_compiles_whole_for_any_size(device: torch.device, sizes: Sizes) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(every_result, fullgraph=True, dynamic=True, backend=counter)
    for step in range(3):
        bags = random_jagged(2, sizes.batch_size + step, sizes.num_rows, seed=step)
        tensors = jagged_arguments(bags, device)
        expected = with_gradient(every_result, tensors, bags.batch_size)
        actual = with_gradient(compiled, tensors, bags.batch_size)
        for result, same in zip(actual, expected, strict=True):
            assert_same_bits(result, same)
    assert counter.frame_count == 1


PERMUTE_ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "values dtype": (
        TypeError,
        r"^values must be int32 or int64 or float32 or .*, got bool; call \.float\(\)$",
        {"values": torch.zeros(3, dtype=torch.bool)},
    ),
    "values shape": (
        ValueError,
        r"^values must have 1 dimension\(s\), got shape \(3, 1\); reshape it$",
        {"values": torch.zeros(3, 1)},
    ),
    "offsets length": (
        ValueError,
        r"^offsets must hold 3 elements \(num_features \* batch_size \+ 1\), got 2$",
        {"offsets": torch.tensor([0, 3])},
    ),
    "weights length": (
        ValueError,
        r"^weights must hold 3 elements \(one for each id\), got 2$",
        {"weights": torch.ones(2)},
    ),
    "a feature that is not there": (
        ValueError,
        r"^permutation must hold features in \[0, 2\), got \[0, 2\]$",
        {"permutation": [0, 2]},
    ),
    "no count": (
        ValueError,
        r"^num_ids must be given, since permutation \[0, 0\] repeats or leaves out some of the 2 ",
        {"permutation": [0, 0]},
    ),
    "too small a count": (
        ValueError,
        r"^num_ids must be 3 or more, the ids of features \[1, 0\], got 2$",
        {"num_ids": 2},
    ),
}


@pytest.mark.parametrize("name", PERMUTE_ERRORS)
def test_permute_names_bad_arguments(name: str) -> None:
    error, message, changes = PERMUTE_ERRORS[name]
    arguments: dict[str, Any] = {
        "values": torch.tensor([7, 8, 9]),
        "offsets": torch.tensor([0, 1, 3]),
        "permutation": [1, 0],
        "num_features": 2,
        "batch_size": 1,
    }
    with pytest.raises(error, match=message):
        permute_features(**arguments | changes)


BUCKETIZE_ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "values dtype": (
        TypeError,
        r"^values must be int32 or int64, got float32; call \.long\(\)$",
        {"values": torch.zeros(3)},
    ),
    "boundaries dtype": (
        TypeError,
        r"^boundaries must be int64, got int32; call \.long\(\)$",
        {"boundaries": torch.zeros(2, 3, dtype=torch.int32)},
    ),
    "boundaries shape": (
        ValueError,
        r"^boundaries must have 2 dimension\(s\), got shape \(3,\); reshape it$",
        {"boundaries": torch.tensor([0, 1, 2])},
    ),
    "no bucket": (
        ValueError,
        r"^boundaries must have a column more than there are buckets, so 2 or more, got shape ",
        {"boundaries": torch.zeros(2, 1, dtype=torch.int64)},
    ),
    "boundaries of too few features": (
        ValueError,
        r"^offsets must hold 2 elements \(num_features \* batch_size \+ 1\), got 3$",
        {"boundaries": torch.tensor([[0, 1, 2]])},
    ),
    "boundaries device": (
        ValueError,
        r"^boundaries must be on cpu as values is, got meta; call \.to\('cpu'\)$",
        {"boundaries": torch.zeros(2, 3, dtype=torch.int64, device="meta")},
    ),
    "too many ids": (
        ValueError,
        r"^values must hold fewer than 2\*\*31 ids, got 2147483648; split the batch$",
        {"values": torch.empty(2**31, dtype=torch.int32, device="meta")},
    ),
}


@pytest.mark.parametrize("name", BUCKETIZE_ERRORS)
def test_bucketize_names_bad_arguments(name: str) -> None:
    error, message, changes = BUCKETIZE_ERRORS[name]
    arguments: dict[str, Any] = {
        "values": torch.tensor([7, 8, 9]),
        "offsets": torch.tensor([0, 1, 3]),
        "boundaries": torch.tensor([[0, 4, 9]] * 2),
        "batch_size": 1,
    }
    with pytest.raises(error, match=message):
        bucketize_rows(**arguments | changes)
