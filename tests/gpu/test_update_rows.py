"""The library's update of rows on a GPU, against the Triton kernels': the same bits."""

import pytest
import torch
from torch import Tensor

from tests.row_updates import scalar
from tests.tolerance import assert_same_bits
from tests.values import normal
from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import RowGradients, UpdateRule
from torchembed.ops.rowwise_update.cuda import cuda_kernel
from torchembed.ops.segments import Runs, find_runs
from torchembed.triton_kernels.rowwise_update import launch_rowwise_update

pytestmark = pytest.mark.gpu

CHUNK = 32
KINDS = (OptimizerKind.SGD, OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD)


@pytest.fixture(autouse=True)
def library_updates(device: torch.device) -> None:
    if cuda_kernel() is None:
        pytest.skip("the C++ library was built without CUDA")


def check(
    rows: Tensor,
    num_rows: int,
    gradients: RowGradients,
    rule: UpdateRule,
    *,
    multiplier: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    device, dim = rows.device, gradients.grad.shape[1]
    runs = find_runs(rows, num_rows)
    results = []
    kernel = cuda_kernel()
    assert kernel is not None
    for launch in (kernel.launch, launch_rowwise_update):
        weight = normal(num_rows, dim, seed=3, device=device)
        shape = rule.state_shape(num_rows, dim)
        states = [normal(*shape, seed=4, device=device).abs() for _ in range(rule.num_states)]
        result = launch(
            *(weight, states[0] if states else None, None, *runs, *gradients),
            *(scalar(0.1, device), None, multiplier, skip, None, None, None),
            *(int(rule.kind), rule.eps, 0.0, 0.0, rule.weight_decay, rule.max_gradient),
        )
        assert result is None
        results.append([weight, *states])
    for found, expected in zip(*results, strict=True):
        assert_same_bits(found, expected)


def skewed(num_ids: int, num_rows: int, device: torch.device) -> Tensor:
    """Rows of which some are hot, in no order, and a few missing."""
    generator = torch.Generator(device).manual_seed(num_ids)
    uniform = torch.rand(num_ids, generator=generator, device=device)
    rows = (uniform**3 * num_rows).long().clamp_max(num_rows - 1)
    rows[::37] = -1
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_pooled_gradients_of_16_bits(kind: OptimizerKind, device: torch.device) -> None:
    num_ids, num_bags = 50_000, 10_000
    gradient_rows = (torch.arange(num_ids, device=device) * 7 % num_bags).int()
    grad = normal(num_bags, 128, seed=0, dtype=torch.bfloat16, device=device)
    rows = skewed(num_ids, 20_000, device).int()
    check(rows, 20_000, RowGradients(grad, gradient_rows), UpdateRule(kind=kind))


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_every_option_in_every_dim(kind: OptimizerKind, dim: int, device: torch.device) -> None:
    num_ids, num_rows = 3_000, 700
    rule = UpdateRule(kind=kind, eps=1e-6, weight_decay=0.05, max_gradient=1.5)
    gradients = RowGradients(
        normal(
            num_ids, dim, seed=0, dtype=torch.float16 if dim == 64 else torch.float32, device=device
        ),
        torch.arange(num_ids, device=device).flip(0),
        normal(num_ids, seed=1, device=device),
    )
    multiplier = scalar(0.7, device)
    check(skewed(num_ids, num_rows, device), num_rows, gradients, rule, multiplier=multiplier)


@pytest.mark.parametrize(
    "length",
    [1, 2, 3, 10, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK**2 - 1, CHUNK**2, CHUNK**2 + 1, 40 * CHUNK**2],
)
def test_runs_of_every_length(length: int, device: torch.device) -> None:
    # Runs of the length start at every place within a tile of the kernel that sums chunks.
    rows = torch.arange(9, device=device).repeat_interleave(length)
    rows = torch.cat([rows, torch.full((length % 5 + 1,), 11, device=device)])
    gradients = RowGradients(normal(rows.numel(), 128, seed=0, device=device))
    check(rows, 20, gradients, UpdateRule(kind=OptimizerKind.ROWWISE_ADAGRAD))


def test_extreme_gradients(device: torch.device) -> None:
    values = [0.0, -0.0, 1e-45, -1e-38, 1e-20, 3e19, -3e38, float("inf"), float("nan"), 1.0]
    grad = torch.tensor(values, device=device).repeat_interleave(32).view(-1, 32)
    grad[:, 4:] = 1e-3
    rows = torch.arange(len(values), device=device)
    for kind in KINDS:
        check(rows, len(values), RowGradients(grad), UpdateRule(kind=kind))


@pytest.mark.parametrize("flag", [1.0, float("nan")])
def test_skips(flag: float, device: torch.device) -> None:
    gradients = RowGradients(normal(100, 32, seed=0, device=device))
    rows = skewed(100, 20, device)
    check(rows, 20, gradients, UpdateRule(kind=KINDS[1]), skip=scalar(flag, device))


def test_no_run_at_all(device: torch.device) -> None:
    rows = torch.full((50,), -1, device=device)
    gradients = RowGradients(normal(50, 32, seed=0, device=device))
    check(rows, 20, gradients, UpdateRule(kind=KINDS[1]))


def test_refuses_what_would_reach_past_memory(device: torch.device) -> None:
    update = torch.ops.torchembed_native.update_rows
    weight, grad = torch.zeros(5, 12, device=device), torch.zeros(3, 12, device=device)
    runs = Runs(*find_runs(torch.tensor([0, 1, 2], device=device), 5))
    options = (int(OptimizerKind.SGD), 0.0, 0.0, 0.0, 1, 0, 0)
    one = scalar(1.0, device)
    with pytest.raises(RuntimeError, match="weight must have 32, 64 or 128 columns, got 12"):
        update(weight, None, *runs, grad, None, None, one, None, None, *options)
    weight = torch.zeros(5, 32, device=device)
    with pytest.raises(RuntimeError, match="grad must have 32 columns, got 12"):
        update(weight, None, *runs, grad, None, None, one, None, None, *options)
