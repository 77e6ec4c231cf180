"""A step of the dense part, its optimizer included, as one CUDA graph."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import lanes
from tests.support.tolerance import assert_same_bits
from tests.support.values import normal
from torchembed.autograd.gradient_slots import slot_of
from torchembed.autograd.weight_gradients import DeferredWeightGradients
from torchembed.modules import MLP, LowRankCross
from torchembed.ops.binary_cross_entropy import binary_cross_entropy
from torchembed.optim import DenseAdagrad, DenseAdam

pytestmark = pytest.mark.gpu

BATCH_SIZE, WIDTH = 1500, 96
DEFERRALS = {"at once": None, "at the end": False, "on a stream": True}


@pytest.fixture(autouse=True)
def compiled_kernels(device: torch.device) -> None:
    if lanes.picked_kernel("dense_update", device) != "triton":
        pytest.skip("the reference may synchronize")


class Step:
    """Forward, backward and update, over static inputs."""

    def __init__(self, kind: Any, dtype: torch.dtype, deferral: bool | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            MLP(WIDTH, [64, WIDTH]),
            LowRankCross(WIDTH, 3, 32),
            MLP(WIDTH, [40, 1], activation_on_last=False),
        ).cuda()
        self.lr = torch.tensor(0.01, device="cuda")
        self.optimizer = kind(self.model.parameters(), lr=self.lr, dtype=dtype)
        self.x = torch.zeros(BATCH_SIZE, WIDTH, device="cuda", dtype=dtype)
        self.labels = torch.zeros(BATCH_SIZE, device="cuda")
        self.loss = torch.zeros((), device="cuda")
        side = torch.cuda.Stream() if deferral else None
        self.deferral: Callable[[], Any] = contextlib.nullcontext
        if deferral is not None:
            self.deferral = lambda: DeferredWeightGradients(side)

    def load(self, seed: int) -> None:
        self.x.copy_(normal(BATCH_SIZE, WIDTH, seed=seed))
        self.labels.copy_(normal(BATCH_SIZE, seed=100 + seed) > 0)
        self.lr.fill_(0.01 / seed)

    def run(self) -> None:
        self.optimizer.zero_grad()
        with self.deferral():
            loss = binary_cross_entropy(self.model(self.x).squeeze(1), self.labels)
            loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def results(self) -> list[Tensor]:
        state = self.optimizer.state_dict()["state"].values()
        return [self.loss, *self.model.parameters(), *(t for e in state for t in e.values())]


@pytest.mark.parametrize("kind", [DenseAdagrad, DenseAdam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deferral", DEFERRALS.values(), ids=DEFERRALS)
def test_a_captured_step_replays(kind: Any, dtype: torch.dtype, deferral: bool | None) -> None:
    eager, captured = Step(kind, dtype, None), Step(kind, dtype, deferral)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for step in (eager, captured):
        step.load(1)
    with torch.cuda.stream(stream):
        captured.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    captured.load(2)
    with torch.cuda.graph(graph):
        captured.run()
    eager.run()
    for seed in (2, 3, 4):
        captured.load(seed)
        graph.replay()
        eager.load(seed)
        eager.run()
        for result, expected in zip(captured.results(), eager.results(), strict=True):
            assert_same_bits(result, expected)
    parameters = captured.model.parameters()
    assert all(slot_of(parameter).holds(parameter.grad) for parameter in parameters)


@pytest.mark.parametrize("deferral", DEFERRALS.values(), ids=DEFERRALS)
def test_nothing_makes_the_host_wait(deferral: bool | None) -> None:
    step = Step(DenseAdagrad, torch.bfloat16, deferral)
    step.load(1)
    step.run()  # compiles the kernels, which waits
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
