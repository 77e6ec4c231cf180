"""A tape repeats what a CUDA graph would: operations on memory, and no Python."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.support.tape import Tape, taped_captures
from tests.support.tiny_model import (
    TinyModel,
    fixed_batch,
    fixed_batches,
    make_batch,
    make_optimizers,
    step_by_hand,
)
from tests.support.tiny_training import LOSS, state_of
from torchembed.data import Batch
from torchembed.training import TrainPipeline

NUM_STEPS = 12


@pytest.fixture(autouse=True)
def _taped() -> Iterator[None]:
    with taped_captures():
        yield


class Deep(TinyModel):
    """Deep, with batch norm, and ``change(vectors)`` between its tables and its layers."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda vectors: vectors) -> None:
        super().__init__(is_deep=True)
        self.change = change

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        vectors = self.change(self.tables(sparse).values())
        return self.dense(torch.cat([dense, vectors], dim=1))


Trained = tuple[list[Tensor], dict[str, Tensor]]


def by_hand(make_model: Callable[[], nn.Module], batches: list[Batch]) -> Trained:
    """The losses and the state after a plain loop."""
    model = make_model()
    optimizers = make_optimizers(model)
    torch.manual_seed(1)
    return [step_by_hand(model, LOSS, optimizers, batch) for batch in batches], state_of(model)


def by_pipeline(make_model: Callable[[], nn.Module], batches: list[Batch]) -> Trained:
    """The losses and the state after steps that are captured."""
    model = make_model()
    torch.manual_seed(1)
    with TrainPipeline(
        model, LOSS, make_optimizers(model), capture=True, self_check_every=None
    ) as pipeline:
        iterator = iter(batches)
        losses = [pipeline.progress(iterator).loss.clone() for _ in batches]
        assert pipeline.engine.is_captured
    return losses, state_of(model)


def are_equal(one: Trained, other: Trained) -> bool:
    same_losses = all(itertools.starmap(torch.equal, zip(one[0], other[0], strict=True)))
    return same_losses and all(torch.equal(t, other[1][name]) for name, t in one[1].items())


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda vectors: vectors,
    "dropout": lambda vectors: F.dropout(vectors, 0.5),
    "random numbers": lambda vectors: vectors + torch.randn_like(vectors),
    "a constant": lambda vectors: vectors * torch.tensor(0.5),
    "views that are written to": lambda vectors: vectors.clone().t().mul_(2).t(),
    "out=": lambda vectors: vectors + torch.mul(vectors.detach(), 2, out=torch.empty(8, 8)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_replays_equal_the_plain_loop(change: str) -> None:
    batches = fixed_batches(NUM_STEPS)

    def make_model() -> nn.Module:
        return Deep(CHANGES[change])

    assert are_equal(by_pipeline(make_model, batches), by_hand(make_model, batches))


def test_padded_steps_equal_the_plain_loop() -> None:
    batches = [make_batch(8, seed) for seed in range(NUM_STEPS)]
    assert are_equal(by_pipeline(Deep, batches), by_hand(Deep, batches))


@pytest.mark.parametrize("make", [fixed_batch, make_batch])
def test_a_replay_counts_nothing(make: Callable[[int, int], Batch]) -> None:
    """A factor that follows a number of Python stays that of the recording."""

    def make_model() -> nn.Module:
        calls = itertools.count(1)
        return Deep(lambda vectors: vectors / next(calls))

    batches = [make(8, seed) for seed in range(NUM_STEPS)]
    assert not are_equal(by_pipeline(make_model, batches), by_hand(make_model, batches))


def test_a_replay_calls_no_hook() -> None:
    layer, x, called = nn.Linear(2, 2), torch.ones(1, 2), list[nn.Module]()
    layer.register_forward_hook(lambda module, *_: called.append(module))
    with Tape() as tape:
        layer(x)
    tape.replay()
    assert called == [layer]


def test_a_replay_knows_the_memory_that_it_was_recorded_with() -> None:
    """A tensor that is replaced is read where it was."""
    x, replaced = torch.ones(3), torch.zeros(3)
    first = replaced
    with Tape() as tape:
        replaced = 0.5 * replaced + x
    for _ in range(2):
        tape.replay()
    assert torch.equal(first, torch.zeros(3))
    assert torch.equal(replaced, x)


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda vectors: vectors * vectors.detach().abs().max().item(),
    "a branch": lambda vectors: vectors if vectors.sum() > 0 else -vectors,
    "nonzero": lambda vectors: vectors + vectors.detach().nonzero().shape[0],
    "a mask": lambda vectors: vectors + vectors.detach()[vectors > 0].sum(),
    "a masked scatter's backward": lambda vectors: torch.zeros_like(vectors).masked_scatter(
        torch.ones_like(vectors, dtype=torch.bool), vectors
    ),
    "tolist": lambda vectors: vectors * vectors.detach()[0].tolist()[0],
    "numpy": lambda vectors: vectors * float(vectors.detach().numpy().max()),
    "host memory": lambda vectors: vectors + torch.tensor([1.0] * 8),
    "a generator": lambda vectors: vectors + torch.rand(8, generator=torch.Generator()),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_waits_for_a_gpu_is_refused(change: str) -> None:
    """The pipeline then trains eagerly, and equals the plain loop: a recording changes nothing."""
    batches = fixed_batches(NUM_STEPS)

    def make_model() -> nn.Module:
        return Deep(REFUSED[change])

    model = make_model()
    pipeline = TrainPipeline(model, LOSS, make_optimizers(model), capture=True)
    iterator = iter(batches)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="not permitted when stream is capturing"):
        losses = [pipeline.progress(iterator).loss.clone() for _ in batches]
    assert are_equal((losses, state_of(model)), by_hand(make_model, batches))


def test_recording_puts_back_what_it_changes_and_replays_write_in_place() -> None:
    x, mask = torch.arange(6.0), torch.tensor([True, False] * 3)
    running = torch.zeros(3)
    torch.manual_seed(0)
    with Tape() as tape:
        view = x.view(2, 3)
        view[0].mul_(10)
        x[mask] = 0.0
        total = (x + torch.rand(6)).sum()
        F.batch_norm(view, running, torch.ones(3), training=True)  # no argument is said to change
    assert torch.equal(x, torch.arange(6.0))
    assert torch.equal(running, torch.zeros(3))
    for _ in range(2):
        tape.replay()
    torch.manual_seed(0)
    expected, expected_running = torch.arange(6.0), torch.zeros(3)
    expected_total = torch.zeros(())
    for _ in range(2):
        expected[:3] *= 10
        expected[mask] = 0.0
        expected_total = (expected + torch.rand(6)).sum()
        F.batch_norm(expected.view(2, 3), expected_running, torch.ones(3), training=True)
    assert torch.equal(x, expected)
    assert torch.equal(running, expected_running)
    assert torch.equal(total, expected_total)


def test_replays_have_the_gradient_mode_of_the_recording() -> None:
    """Torch's LSTM keeps what its backward needs only where gradients are enabled."""
    torch.manual_seed(0)
    lstm, x = nn.LSTM(4, 8, num_layers=2), torch.randn(3, 5, 4)
    with Tape() as tape:
        states, _ = lstm(x)
        states.sum().backward()
    weight = lstm.get_parameter("weight_hh_l0")
    gradient = weight.grad
    assert gradient is not None
    x.mul_(2)
    lstm.zero_grad()
    lstm(x)[0].sum().backward()
    tape.replay()
    assert weight.grad is not None
    assert torch.equal(gradient, weight.grad)


def test_replays_write_to_tensors_of_inference_mode() -> None:
    x = torch.arange(3.0)
    with Tape() as tape:
        with torch.inference_mode():
            doubled = (x * 2).add_(1)
        result = doubled.clone() + x
    x.add_(1)
    tape.replay()
    assert torch.equal(result, 3 * x + 1)


def test_memory_of_two_storages_is_put_back() -> None:
    """A table's parameter is a part of its group's memory under a storage of its own."""
    whole = torch.arange(6.0)
    part = torch.from_dlpack(whole[2:4])
    with Tape():
        whole.add_(1)
        part.mul_(3)
        whole.add_(1)
    assert torch.equal(whole, torch.arange(6.0))
