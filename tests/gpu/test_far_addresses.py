"""Tables, outputs and gradients of more than 2**31 elements, for real."""

import pytest
import torch
from torch import Tensor

from tests.support.tolerance import assert_same_bits
from tests.support.values import normal
from torchembed.core.types import OptimizerKind
from torchembed.ops.pooled_lookup import pooled_lookup
from torchembed.ops.rowwise_update import RowGradients, UpdateRule, rowwise_update
from torchembed.ops.segments import find_runs
from torchembed.ops.sequence_lookup import sequence_lookup

pytestmark = pytest.mark.gpu

DIM = 64
NUM_FAR = 2**31 // DIM + 5
"""Rows of a matrix whose last ones begin beyond element 2**31."""


@pytest.fixture(autouse=True)
def enough_memory(device: torch.device, fastest_algorithms: None) -> None:
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if free_bytes < 16 * 2**30:
        pytest.skip(f"needs 16 GiB of free device memory, has {free_bytes / 2**30:.0f}")


@pytest.fixture
def weight(device: torch.device) -> Tensor:
    """Zeros, but for rows at both ends."""
    weight = torch.zeros(NUM_FAR, DIM, dtype=torch.bfloat16, device=device)
    weight[:8] = normal(8, DIM, seed=0, device=device).to(weight.dtype)
    weight[-8:] = normal(8, DIM, seed=1, device=device).to(weight.dtype)
    return weight


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lookups_in_a_large_table(weight: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    rows = torch.tensor([NUM_FAR - 1, 3, NUM_FAR - 8, 0, -1, NUM_FAR - 1], device=device)
    vectors = sequence_lookup(weight, rows.to(dtype))
    expected = torch.where((rows >= 0).unsqueeze(1), weight[rows.clamp_min(0)], 0.0)
    assert_same_bits(vectors, expected)
    pooled = pooled_lookup(weight, rows.to(dtype), hotness=[2], batch_size=3)
    assert_same_bits(pooled.squeeze(1), expected.float().view(3, 2, DIM).sum(1).bfloat16())


def test_update_of_a_large_table(weight: Tensor, device: torch.device) -> None:
    rows = torch.tensor([NUM_FAR - 1, 3, NUM_FAR - 8, NUM_FAR - 1], device=device)
    grad = normal(4, DIM, seed=2, device=device)
    expected = weight[rows[:3]].float()
    expected -= torch.stack([grad[0] + grad[3], grad[1], grad[2]])
    rule = UpdateRule(kind=OptimizerKind.SGD)
    runs = find_runs(rows, NUM_FAR)
    rowwise_update(weight, (), runs, RowGradients(grad), rule, torch.ones(1, device=device))
    assert_same_bits(weight[rows[:3]], expected.bfloat16())
    assert weight[8:-8].abs().amax(1).max() == 0


def test_adagrad_of_a_large_table(device: torch.device) -> None:
    dim = 128  # what the library's own kernel takes
    last = 2**31 // dim + 4
    weight, totals = (torch.zeros(last + 1, *shape, device=device) for shape in ((dim,), ()))
    rows = torch.full((41,), last, device=device)  # a chunk and more, and one short run
    rows[7] = 3
    rowwise_update(
        weight,
        (totals,),
        find_runs(rows, last + 1),
        RowGradients(torch.ones(41, dim, device=device)),
        UpdateRule(kind=OptimizerKind.ROWWISE_ADAGRAD, eps=0.0),
        torch.ones(1, device=device),
    )
    assert (weight[[3, last]] == -1).all() and weight.count_nonzero() == 2 * dim
    assert totals[[3, last]].tolist() == [1, 1600] and totals.count_nonzero() == 2


def test_a_large_output_and_its_gradient(device: torch.device) -> None:
    weight = normal(100, DIM, seed=3, dtype=torch.float16, device=device)
    rows = (torch.arange(NUM_FAR, device=device, dtype=torch.int32) * 7 % 100).int()
    vectors = sequence_lookup(weight, rows)
    for part in (slice(0, 1000), slice(NUM_FAR // 2, NUM_FAR // 2 + 1000), slice(-1000, None)):
        assert_same_bits(vectors[part], weight[rows[part].long()])
    # Only the last positions have a gradient: row 0 gets the last 5 rows of them.
    rows.fill_(-1)
    rows[-5:] = 0
    vectors[-5:] = torch.arange(5, device=device, dtype=torch.float16).unsqueeze(1)
    total = torch.zeros(1, DIM, device=device)
    rule = UpdateRule(kind=OptimizerKind.SGD)
    minus_one = torch.full((1,), -1.0, device=device)
    rowwise_update(total, (), find_runs(rows, 1), RowGradients(vectors), rule, minus_one)
    assert_same_bits(total, torch.full((1, DIM), 10.0))
