"""Compiled kernels on batches of a real size, against the references.

Inputs are small integers, so that sums are exact and only what is really wrong can differ.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import lanes
from tests.support.bags import MISSING
from tests.support.tolerance import assert_follows, assert_same_bits, relative_error
from tests.support.values import normal
from torchembed.core.types import OnBadId, OptimizerKind
from torchembed.core.update_records import RowUpdate
from torchembed.ops.linearize_ids import linearize_ids
from torchembed.ops.linearize_ids.reference import linearize_ids_reference
from torchembed.ops.pooled_lookup import reference as pooled_reference
from torchembed.ops.pooled_lookup import schema as pooled_schema
from torchembed.ops.rowwise_update.reference import rowwise_update_reference
from torchembed.ops.rowwise_update.schema import rowwise_update_op
from torchembed.ops.segments import find_runs
from torchembed.ops.segments.reference import find_runs_reference
from torchembed.ops.sequence_lookup.reference import sequence_lookup_forward_reference
from torchembed.ops.sequence_lookup.schema import sequence_lookup_forward_op

pytestmark = pytest.mark.gpu

HOTNESS = [1, 2, 3, 5, 8, 11]
NUM_FEATURES, BATCH_SIZE, NUM_ROWS = len(HOTNESS), 2048, 10_000
NUM_IDS = sum(HOTNESS) * BATCH_SIZE
SHAPES = [(torch.float32, 128), (torch.float16, 64), (torch.bfloat16, 100)]


@pytest.fixture(autouse=True)
def compiled_kernels(device: torch.device) -> None:
    if lanes.picked_kernel("rowwise_update", device) != "triton":
        pytest.skip("the reference would be compared with itself")


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def zipf_rows(num_ids: int = NUM_IDS, num_rows: int = NUM_ROWS, seed: int = 0) -> Tensor:
    """Row r occurs about in proportion to 1 / (r + 1); some positions are missing."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(num_ids, generator=generator, dtype=torch.float64)
    rows = ((num_rows + 1.0) ** uniform - 1).long().clamp_max(num_rows - 1)
    rows[::29] = MISSING
    return rows


def jagged_offsets() -> Tensor:
    """Bags of 0 to 9 ids, cut off at the number of ids."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(10, (NUM_FEATURES * BATCH_SIZE,), generator=generator)
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).clamp_max(NUM_IDS)


def check(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: Sequence[Any],
    device: torch.device,
) -> None:
    """Every result of ``op`` on ``device`` has the bits of the reference's on the CPU."""
    moved = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
    results, expected = op(*moved), reference(*arguments)
    if isinstance(expected, Tensor):
        results, expected = [results], [expected]
    for result, wanted in zip(results, expected, strict=True):
        assert_same_bits(result, wanted)


@pytest.mark.parametrize("fixed", [False, True], ids=["jagged", "fixed"])
def test_linearize_ids(fixed: bool, device: torch.device) -> None:
    tables = torch.arange(NUM_FEATURES)
    for dtype in (torch.int32, torch.int64):
        arguments = (
            (zipf_rows() + 1).to(dtype),
            None if fixed else jagged_offsets().to(dtype),
            HOTNESS if fixed else [],
            tables * 1000,
            tables * 1000 + 5000,
            BATCH_SIZE,
            int(OnBadId.CLAMP),
            dtype,
        )
        op = torch.ops.torchembed.linearize_ids
        check(op, linearize_ids_reference, arguments, device)


@pytest.mark.parametrize("num_rows", [NUM_ROWS, 2**40])
def test_find_runs(num_rows: int, device: torch.device) -> None:
    for rows in (zipf_rows(), torch.zeros(NUM_IDS).long(), torch.arange(NUM_IDS) % num_rows):
        arguments = (rows, num_rows)
        check(torch.ops.torchembed.find_runs, find_runs_reference, arguments, device)


@pytest.mark.parametrize("fixed", [False, True], ids=["jagged", "fixed"])
@pytest.mark.parametrize(("dtype", "dim"), SHAPES)
def test_lookups(dtype: torch.dtype, dim: int, fixed: bool, device: torch.device) -> None:
    weight, rows = integers(NUM_ROWS, dim, seed=2, dtype=dtype), zipf_rows()
    grad = integers(BATCH_SIZE, NUM_FEATURES, dim, seed=3, dtype=dtype)
    per_id_weights = None if fixed else integers(NUM_IDS, seed=4)
    offsets = None if fixed else jagged_offsets().int()
    if offsets is not None:
        rows[int(offsets[-1]) :] = MISSING
    grouping = (offsets, HOTNESS if fixed else [])
    sizes = (NUM_FEATURES, BATCH_SIZE, not fixed)
    for ids in (rows, rows.int()):
        check(
            pooled_schema.pooled_lookup_forward_op,
            pooled_reference.pooled_lookup_forward_reference,
            (weight, ids, *grouping, per_id_weights, *sizes, dtype),
            device,
        )
    check(
        pooled_schema.pooled_lookup_gradient_map_op,
        pooled_reference.pooled_lookup_gradient_map_reference,
        (rows, *grouping, per_id_weights, *sizes),
        device,
    )
    arguments = (grad, weight, rows, *grouping, not fixed)
    moved = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
    result = pooled_schema.pooled_lookup_weights_backward_op(*moved).cpu()
    expected = pooled_reference.pooled_lookup_weights_backward_reference(*arguments)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    check(
        sequence_lookup_forward_op,
        sequence_lookup_forward_reference,
        (weight, rows, torch.float32),
        device,
    )


@pytest.mark.parametrize("kind", list(OptimizerKind))
@pytest.mark.parametrize(("dtype", "dim"), [*SHAPES, (torch.float32, 512)])
def test_updates(dtype: torch.dtype, dim: int, kind: OptimizerKind, device: torch.device) -> None:
    rounds = dtype != torch.float32
    state_shape = (NUM_ROWS,) if kind is OptimizerKind.ROWWISE_ADAGRAD else (NUM_ROWS, dim)
    num_states = {OptimizerKind.SGD: 0, OptimizerKind.ADAM: 2}.get(kind, 1)
    states = [integers(*state_shape, seed=5).abs() for _ in range(num_states)]
    num_bags = NUM_FEATURES * BATCH_SIZE
    arguments = [
        integers(NUM_ROWS, dim, seed=6, dtype=dtype),
        *states,
        *[None] * (2 - num_states),
        *find_runs_reference(zipf_rows(), NUM_ROWS),
        integers(num_bags, dim, seed=7, dtype=dtype),
        (torch.arange(NUM_IDS) % num_bags).int(),
        integers(NUM_IDS, seed=8),
        torch.tensor([0.01]),
        torch.tensor([2.0]),
        torch.tensor([0.5]),
        torch.zeros(1),
        torch.tensor([0, 10, 10, 4000, NUM_ROWS]) if rounds else None,
        torch.tensor([11, 12, 13, 14]) if rounds else None,
        torch.tensor([0, 100, 0, 50]) if rounds else None,
        *(int(kind), 1e-8, 0.9, 0.999, 0.0, 50.0),
    ]
    moved = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
    rowwise_update_op(*moved)
    rowwise_update_reference(RowUpdate(*arguments))
    weight, expected = moved[0].cpu(), arguments[0]
    for state, wanted in zip(moved[1 : 1 + num_states], states, strict=True):
        if kind is OptimizerKind.ROWWISE_ADAGRAD:
            # An exact sum of squares over 100 columns, a quotient or a product with a rounded
            # reciprocal, and a sum, on both sides.
            torch.testing.assert_close(state.cpu(), wanted, rtol=relative_error(6), atol=0)
        else:
            assert_same_bits(state, wanted)
    if kind is OptimizerKind.SGD:
        assert_same_bits(weight, expected)
    else:
        # Torch's square roots on the CPU may be off by a bit, which may round another way.
        band = torch.finfo(dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(weight, expected, rtol=0, atol=band)


def test_a_row_that_occurs_100_000_times(device: torch.device) -> None:
    num_ids, dim = 250_000, 128
    rows = zipf_rows(num_ids, 100, seed=9).to(device)
    rows[50_000:150_000] = 7
    grad = normal(num_ids, dim, seed=10, device=device)

    def summed() -> Tensor:
        weight = torch.zeros(100, dim, device=device)
        rowwise_update_op(
            weight,
            *[None] * 2,
            *find_runs(rows, 100),
            grad,
            *[None] * 2,
            torch.full((1,), -1.0, device=device),
            *[None] * 6,
            int(OptimizerKind.SGD),
            *[0.0] * 5,
        )
        return weight

    def formula(dtype: torch.dtype) -> Tensor:
        sums = torch.zeros(100, dim, dtype=dtype)
        found = (rows >= 0).cpu()
        return sums.index_add_(0, rows.cpu()[found], grad.cpu().to(dtype)[found])

    result = summed()
    assert_follows(result, formula)
    for _ in range(5):
        assert_same_bits(summed(), result)


def test_a_graph_keeps_the_bounds_that_it_captured(
    device: torch.device, fastest_algorithms: None
) -> None:
    """Bounds of a hotness are kept in a cache of bounded size; a graph outlives their eviction."""
    from torchembed.triton_kernels import bags

    values = zipf_rows().clamp_min(0).to(device)
    first_rows = torch.arange(NUM_FEATURES, device=device) * NUM_ROWS
    num_rows = torch.full_like(first_rows, NUM_ROWS)

    def rows() -> Tensor:
        return linearize_ids(
            values, first_rows, num_rows, hotness=HOTNESS, batch_size=BATCH_SIZE
        ).rows

    expected = rows()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = rows()
    bags._fixed_bounds.cache_clear()
    # What is freed would be handed out again.
    junk = [torch.full((NUM_FEATURES + 1,), 3, device=device) for _ in range(100)]
    result.fill_(-7)
    graph.replay()
    assert_same_bits(result, expected)
    assert len(junk) == 100


def test_launches_follow_their_tensors(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1)
    runs = find_runs(zipf_rows().to(other), NUM_ROWS)
    for result, expected in zip(runs, find_runs_reference(zipf_rows(), NUM_ROWS), strict=True):
        assert result.device == other
        assert_same_bits(result, expected)
