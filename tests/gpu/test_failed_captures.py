"""After a capture that fails, the process goes on as if there had been none."""

import collections
import gc
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers, step_by_hand
from tests.support.tiny_training import LOSS, assert_same_state, state_of
from torchembed.core.random_numbers import saved_random_numbers
from torchembed.step.batches.bucketized_buffers import BucketizedBuffers
from torchembed.step.batches.input_buffers import InputBuffers
from torchembed.step.engines.captured_call import CapturedCall
from torchembed.step.engines.collective_capture import failure_on_any_rank
from torchembed.step.graph_capture import captured_graph
from torchembed.step.watches.host_state import HostState
from torchembed.training import TrainPipeline

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["a step", "bucketized ids"])
def fail(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Fails to capture a draw of random numbers, after which the host waits for the device."""
    stream, numbers = torch.cuda.Stream(), torch.zeros(3, device=device)

    def wait() -> None:
        numbers.copy_(torch.rand_like(numbers))
        numbers[0].item()

    buffers = BucketizedBuffers(InputBuffers(numbers, device), [], device, 0)
    monkeypatch.setattr(buffers, "_bucketize", lambda buffer: wait())

    def capture() -> None:
        if request.param == "a step":
            CapturedCall(wait, None, stream, None)
        else:
            buffers.capture(stream)

    def fail() -> None:
        state = HostState(nn.Linear(2, 2), device)
        with pytest.warns(UserWarning, match="could not be captured"):
            failure_on_any_rank(capture, state)

    return fail


def test_random_numbers_are_those_of_no_capture(
    device: torch.device, fail: Callable[[], None]
) -> None:
    numbers = torch.zeros(3, device=device)

    def draw() -> None:
        numbers.copy_(torch.rand_like(numbers))

    captured = CapturedCall(draw, None, torch.cuda.Stream(), None)

    def drawn() -> list[float]:
        captured.replay()
        return [*numbers.tolist(), *torch.rand(2, device=device).tolist()]

    torch.manual_seed(3)
    expected = [drawn(), drawn()]
    torch.manual_seed(3)
    assert drawn() == expected[0]
    fail()
    assert drawn() == expected[1]


def test_memory_is_freed_and_the_stream_is_the_same(
    device: torch.device, fail: Callable[[], None]
) -> None:
    def reserved_after_use() -> int:
        block, stream = torch.empty(1 << 28, device=device), torch.cuda.Stream()
        block.record_stream(stream)
        del block
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    before, stream = reserved_after_use(), torch.cuda.current_stream()
    fail()
    assert torch.cuda.current_stream() == stream
    assert reserved_after_use() < before + (1 << 28)


class Recurrent(TinyModel):
    """An LSTM with dropout, whose masks cuDNN draws from a state that seeds reset."""

    def __init__(self, factors: Iterator[float] | None = None) -> None:
        super().__init__(is_deep=True)
        self.lstm = nn.LSTM(1, 4, num_layers=2, batch_first=True, dropout=0.5)
        self._factors = itertools.repeat(1.0) if factors is None else factors

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        states, _ = self.lstm(self.tables(sparse).values()[:, :, None] * next(self._factors))
        return super().forward(dense, sparse) + states[:, -1, :1]


def test_dropout_of_cudnn_is_that_of_a_plain_loop(device: torch.device) -> None:
    batches = [batch.to(device) for batch in fixed_batches(10)]

    def trained(is_captured: bool) -> tuple[list[float], nn.Module]:
        torch.manual_seed(0)
        model = Recurrent().to(device)
        optimizers = make_optimizers(model)
        torch.manual_seed(1)
        if not is_captured:
            return [step_by_hand(model, LOSS, optimizers, b).item() for b in batches], model
        with TrainPipeline(model, LOSS, optimizers, self_check_every=3) as pipeline:
            iterator = iter(batches)
            losses = [pipeline.progress(iterator).loss.item() for _ in batches]
            assert pipeline.num_captures > 0
            assert pipeline.engine.is_captured  # the comparisons drew the same masks
        return losses, model

    expected, by_hand = trained(is_captured=False)
    found, model = trained(is_captured=True)
    assert found == expected
    assert_same_state(model, state_of(by_hand))


def test_a_difference_before_dropout_of_cudnn_is_found(device: torch.device) -> None:
    model = Recurrent(itertools.count(1.0)).to(device)
    batches = iter([batch.to(device) for batch in fixed_batches(16)])
    with TrainPipeline(model, LOSS, make_optimizers(model), self_check_every=2) as pipeline:
        with pytest.warns(UserWarning, match=r"the output of lstm \(LSTM\) has the norm"):
            collections.deque(map(pipeline.progress, [batches] * 16), maxlen=0)
        assert not pipeline.engine.is_captured


def test_random_numbers_put_back_leave_dropout_of_cudnn_alone(device: torch.device) -> None:
    lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5, device=device)
    x = torch.ones(5, 3, 4, device=device)

    def outputs(is_put_back: bool) -> list[Tensor]:
        torch.manual_seed(0)
        first = lstm(x)[0]
        if is_put_back:
            saved_random_numbers(device)()
        return [first, lstm(x)[0]]

    for found, expected in zip(outputs(True), outputs(False), strict=True):
        assert torch.equal(found, expected)


def test_garbage_that_holds_a_graph_does_not_break_a_capture(device: torch.device) -> None:
    total = torch.zeros(1, device=device)
    stream = torch.cuda.Stream(device)

    def makes_objects() -> None:
        total.add_(1)
        assert len([[number] for number in range(10_000)]) == 10_000

    garbage: list[object] = [captured_graph(makes_objects, stream)]
    garbage.append(garbage)
    del garbage
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        graph = captured_graph(makes_objects, stream)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
    graph.replay()
    assert total.item() == 1
