"""The loop does what is written by hand, and stops where it should."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from tests.support.tiny_model import TinyModel, make_batches, make_optimizers
from tests.support.tolerance import relative_error
from torchembed.step.model_loss import LossFunction
from torchembed.training import History, Progress, TrainPipeline, in_step, train

LOSS = F.binary_cross_entropy_with_logits


def weights_of(model: TinyModel) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def test_train_equals_the_loop_by_hand() -> None:
    sizes = (8, 8, 8, 3)
    model = TinyModel(is_deep=True)
    losses, optimizers = [], make_optimizers(model)
    for batch in make_batches(sizes):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = LOSS(model(batch.dense, batch.sparse)[:, 0], batch.labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    by_hand = weights_of(model)

    model = TinyModel(is_deep=True)
    history = train(
        TrainPipeline(model, LOSS, make_optimizers(model)),
        make_batches(sizes),
        history=History(read_loss_every=3),
    )
    for ours, theirs in zip(weights_of(model), by_hand, strict=True):
        assert torch.equal(ours, theirs)
    assert (history.num_steps, history.num_samples) == (4, sum(sizes))
    assert [point.step for point in history.losses] == [3, 4]
    # Two sums and a product of float32; the last mean is of one loss, times the size of its batch.
    expected = sum(losses[:3]) / 3
    assert history.losses[0].loss == pytest.approx(expected, rel=relative_error(3), abs=0)
    assert history.losses[1].loss == pytest.approx(losses[3], rel=relative_error(1), abs=0)
    assert history.samples_per_second == history.num_samples / history.seconds


def test_a_frozen_batch_norm_stays_frozen() -> None:
    model = TinyModel(is_deep=True)
    norm = next(module for module in model.modules() if isinstance(module, torch.nn.BatchNorm1d))
    norm.eval()
    assert norm.running_mean is not None
    mean = norm.running_mean.clone()
    pipeline = TrainPipeline(model, LOSS, make_optimizers(model))
    train(pipeline, make_batches([4, 4]))
    assert torch.equal(norm.running_mean, mean)
    assert [m for m in model.modules() if not m.training] == [norm]
    model.eval()
    train(pipeline, make_batches([4]))
    assert all(module.training for module in model.modules())
    assert not torch.equal(norm.running_mean, mean)


def test_an_iterator_is_continued_after_max_steps() -> None:
    whole, parts = TinyModel(), TinyModel()
    train(TrainPipeline(whole, LOSS, make_optimizers(whole)), make_batches([4] * 5))
    batches, optimizers, history = make_batches([4] * 5), make_optimizers(parts), History()
    for max_steps, num_steps in ((2, 2), (0, 2), (2, 4), (2, 5), (2, 5)):
        train(TrainPipeline(parts, LOSS, optimizers), batches, max_steps=max_steps, history=history)
        assert history.num_steps == num_steps
    for ours, theirs in zip(weights_of(parts), weights_of(whole), strict=True):
        assert torch.equal(ours, theirs)


def test_schedulers_step_with_the_optimizers() -> None:
    model = TinyModel()
    optimizers = make_optimizers(model, lr=1.0)
    schedulers = [ExponentialLR(optimizer, gamma=0.5) for optimizer in optimizers]
    train(TrainPipeline(model, LOSS, optimizers), make_batches([4] * 3), schedulers=schedulers)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.125, 0.125]


def test_an_empty_batch_has_no_loss_and_zero_gradients() -> None:
    model = TinyModel()
    before = weights_of(model)
    optimizers = [
        torch.optim.SGD(model.dense.parameters(), lr=1.0),
        torch.optim.SGD(model.tables.parameters(), lr=1.0),
    ]
    assert TrainPipeline(model, LOSS, optimizers).progress(make_batches([0])).loss == 0
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
    for ours, theirs in zip(weights_of(model), before, strict=True):
        assert torch.equal(ours, theirs)


def test_a_loss_that_is_not_finite_ends_training() -> None:
    model = TinyModel()

    def diverging(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.sum() * math.inf

    with pytest.raises(FloatingPointError, match=r"the loss became \S+ within the 2 steps .* 2;"):
        train(
            TrainPipeline(model, diverging, make_optimizers(model)),
            make_batches([4] * 9),
            history=History(read_loss_every=2),
        )


def test_a_bad_batch_is_named() -> None:
    with pytest.raises(TypeError, match=r"a batch must be \(dense, sparse, labels\), got 2 parts"):
        next(in_step([(torch.zeros(1, 1), torch.zeros(1, 1))], "cpu"))


@pytest.mark.parametrize("loss_fn", [F.mse_loss, None])
def test_none_is_no_batch_and_no_end(loss_fn: LossFunction | None) -> None:
    model = TinyModel()
    with pytest.raises(TypeError, match="a batch must not be None, which is no end of the batches"):
        train(TrainPipeline(model, loss_fn, make_optimizers(model)), [None])
    pipeline = TrainPipeline(model, loss_fn, make_optimizers(model))
    with pytest.raises(TypeError, match="a batch must not be None"):
        pipeline.progress(iter([None]))


def test_progress_counts_steps(capsys: pytest.CaptureFixture[str]) -> None:
    model = TinyModel()
    with Progress(total=3, label="tiny") as progress:
        history = History(read_loss_every=1)
        train(
            TrainPipeline(model, LOSS, make_optimizers(model)),
            make_batches([4] * 3),
            history=history,
            progress=progress,
        )
        progress.show(auc=0.75)
    shown = capsys.readouterr()
    assert not shown.out
    assert "tiny: 100%" in shown.err
    assert "3/3" in shown.err


def test_history_must_read_the_loss_at_some_step() -> None:
    with pytest.raises(ValueError, match="read_loss_every must be at least 1, got 0"):
        History(read_loss_every=0)
