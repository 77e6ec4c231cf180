"""On a GPU no operation makes the host wait, so a whole step becomes one CUDA graph."""

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.support import lanes
from tests.support.tolerance import assert_same_bits
from tests.support.values import normal
from torchembed.core.types import OnBadId, OptimizerKind, Pooling
from torchembed.ops.linearize_ids import linearize_ids
from torchembed.ops.pooled_lookup import pooled_lookup
from torchembed.ops.rowwise_update import (
    RoundingKeys,
    RowGradients,
    UpdateRule,
    rowwise_update,
)
from torchembed.ops.segments import find_runs
from torchembed.ops.sequence_lookup import sequence_lookup

NUM_FEATURES, BATCH_SIZE, CAPACITY, NUM_ROWS, DIM = 3, 64, 500, 1000, 32

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def compiled_kernels(device: torch.device) -> None:
    if lanes.picked_kernel("rowwise_update", device) != "triton":
        pytest.skip("the reference may synchronize")


@dataclasses.dataclass
class Step:
    """Ids to rows, to pooled and unpooled vectors, their gradients, and the rows' update; jagged
    bags in buffers of static capacity, or bags of fixed hotness."""

    device: torch.device
    fixed: bool
    num_steps: int = 0

    def __post_init__(self) -> None:
        device = self.device
        self.hotness = (2, 1, 3) if self.fixed else None
        num_ids = BATCH_SIZE * 6 if self.fixed else CAPACITY
        self.values = torch.zeros(num_ids, dtype=torch.int64, device=device)
        self.offsets = torch.zeros(NUM_FEATURES * BATCH_SIZE + 1, dtype=torch.int64, device=device)
        self.first_rows = torch.tensor([0, 400, 400], device=device)
        self.num_rows = torch.tensor([400, 600, 600], device=device)
        self.per_id_weights = normal(num_ids, seed=1, device=device).requires_grad_()
        self.grad = normal(BATCH_SIZE, NUM_FEATURES, DIM, seed=2, device=device)
        self.lr, self.count = torch.full((2, 1), 0.1, device=device)
        self.skip = torch.zeros(1, device=device)
        self.rounding = RoundingKeys(
            torch.tensor([0, 400, NUM_ROWS], device=device), torch.tensor([5, 6], device=device)
        )
        self.reset()

    def reset(self) -> None:
        weight = normal(NUM_ROWS, DIM, seed=0, dtype=torch.bfloat16, device=self.device)
        self.weight = weight.requires_grad_()
        self.state = torch.zeros(NUM_ROWS, device=self.device)

    def load(self, seed: int) -> None:
        """Another batch, in the same buffers."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(-1, 420, self.values.shape, generator=generator)
        lengths = torch.randint(5, (NUM_FEATURES * BATCH_SIZE,), generator=generator)
        ends = lengths.cumsum(0).clamp_max(CAPACITY)
        self.values.copy_(ids)
        self.offsets[1:].copy_(ends)
        self.count.fill_(seed)

    def run(self) -> list[Tensor]:
        offsets = None if self.fixed else self.offsets
        rows, first_bad = linearize_ids(
            self.values,
            self.first_rows,
            self.num_rows,
            offsets=offsets,
            hotness=self.hotness,
            batch_size=BATCH_SIZE,
            on_bad_id=OnBadId.ZERO,
            rows_dtype=torch.int32,
        )
        taken: list[tuple[Tensor, RowGradients]] = []
        pooled = pooled_lookup(
            self.weight,
            rows,
            offsets=offsets,
            hotness=self.hotness,
            batch_size=BATCH_SIZE,
            num_features=NUM_FEATURES,
            per_id_weights=self.per_id_weights,
            pooling=Pooling.MEAN,
            output_dtype=torch.float32,
            sink=lambda *entry: taken.append(entry),
        )
        (weights_grad,) = torch.autograd.grad(
            pooled, [self.per_id_weights], self.grad, retain_graph=True
        )
        pooled.backward(self.grad)
        self.per_id_weights.grad = None
        (dense_grad,) = torch.autograd.grad(sequence_lookup(self.weight, rows).sum(), self.weight)
        ((rows, gradients),) = taken[-1:]
        rowwise_update(
            self.weight.detach(),
            (self.state,),
            find_runs(rows, NUM_ROWS),
            gradients,
            UpdateRule(kind=OptimizerKind.ROWWISE_ADAGRAD),
            self.lr,
            step=self.count,
            skip=self.skip,
            rounding=self.rounding,
        )
        return [first_bad, pooled, weights_grad, dense_grad, self.weight, self.state]


@pytest.mark.parametrize("fixed", [False, True], ids=["jagged", "fixed"])
def test_nothing_makes_the_host_wait(fixed: bool, device: torch.device) -> None:
    step = Step(device, fixed)
    step.load(1)
    step.run()  # compiles the kernels, which waits
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fixed", [False, True], ids=["jagged", "fixed"])
def test_a_captured_step_replays_on_other_batches(fixed: bool, device: torch.device) -> None:
    eager, captured = Step(device, fixed), Step(device, fixed)
    captured.load(1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = captured.run()
    fresh = Step(device, fixed)
    with torch.no_grad():
        captured.weight.copy_(fresh.weight)
        captured.state.copy_(fresh.state)
    for seed in (2, 3, 4):
        captured.load(seed)
        graph.replay()
        eager.load(seed)
        for result, expected in zip(results, eager.run(), strict=True):
            assert_same_bits(result, expected)
