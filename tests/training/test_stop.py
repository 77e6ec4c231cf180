"""Signals end training after a step, and what follows is as if they had not."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tests.support.tiny_model import TinyModel, make_batches, make_optimizers
from torchembed.data import Batch
from torchembed.training import History, StopSignal, TrainPipeline, evaluate, train

LOSS = F.binary_cross_entropy_with_logits


def killing_batches(sizes: list[int], at: int, number: signal.Signals) -> Iterator[Batch]:
    """The signal comes while batch ``at`` is made, so its step is the last."""
    for index, batch in enumerate(make_batches(sizes)):
        if index == at:
            os.kill(os.getpid(), number)
        yield batch


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_training_ends_after_a_step_and_goes_on_with_the_same_points(
    number: signal.Signals,
) -> None:
    whole, parts = TinyModel(), TinyModel()
    expected = train(
        TrainPipeline(whole, LOSS, make_optimizers(whole)),
        make_batches([4] * 9),
        history=History(3),
    )
    history, optimizers = History(3), make_optimizers(parts)
    before = signal.getsignal(number)
    batches = killing_batches([4] * 9, 4, number)
    with StopSignal() as stop:
        train(TrainPipeline(parts, LOSS, optimizers), batches, history=history, stop=stop)
        assert stop.is_requested
        assert stop.is_agreed
    assert signal.getsignal(number) is before
    assert history.num_steps == 5
    assert [point.step for point in history.losses] == [3]
    loaded = History(3)
    loaded.load_state_dict(history.state_dict())
    train(TrainPipeline(parts, LOSS, optimizers), batches, history=loaded)
    assert loaded.losses == expected.losses
    assert loaded.num_samples == expected.num_samples
    for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_where_the_last_step_was_due_anyway_the_loss_is_read() -> None:
    model, history = TinyModel(), History(3)
    with StopSignal() as stop:
        batches = killing_batches([4] * 9, 3, signal.SIGTERM)
        train(
            TrainPipeline(model, LOSS, make_optimizers(model)),
            batches,
            history=history,
            stop=stop,
            max_steps=4,
        )
        assert stop.is_agreed
    assert [point.step for point in history.losses] == [3, 4]


def test_an_evaluation_ends_after_a_batch_without_a_result() -> None:
    model = TinyModel()
    batches = killing_batches([4] * 9, 3, signal.SIGTERM)
    with StopSignal() as stop:
        assert evaluate(model, batches, stop=stop) is None
        assert stop.is_agreed
    assert model.training
    assert len(list(batches)) == 5
    with StopSignal() as stop:
        expected = evaluate(model, make_batches([4] * 9))
        assert evaluate(model, make_batches([4] * 9), stop=stop) == expected
        assert not stop.is_agreed


def test_a_second_interrupt_interrupts() -> None:
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_thread_may_only_ask() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter() -> None:
        with StopSignal() as stop:
            stop.request()
            seen.append((stop.is_requested, signal.getsignal(signal.SIGTERM) is before))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(True, True)]
