"""The loop: copy to the device, forward, loss, backward, step."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from torchembed.data.batch import Batch
from torchembed.training.batches import in_step
from torchembed.training.history import History
from torchembed.training.metrics import MetricsWriter
from torchembed.training.progress import Progress
from torchembed.training.stop import StopSignal

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""``(logits [B], labels [B])`` to their mean loss ``[]``; never called with ``B = 0``."""


def device_of(model: nn.Module) -> torch.device:
    """Where the first parameter of ``model`` is."""
    return next(model.parameters()).device


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """``model(dense, sparse)`` as ``[B]``."""
    return model(batch.dense, batch.sparse).reshape(len(batch.labels))


def train_step(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Batch,
) -> Tensor:
    """One step on ``batch``, which is on the model's device; the host does not wait for it.

    An empty batch has the loss 0 and gives zero gradients.

    Returns:
        The mean loss of the batch, ``[]``, detached.
    """
    for optimizer in optimizers:
        optimizer.zero_grad()
    logits = logits_of(model, batch)
    loss = loss_fn(logits, batch.labels) if len(batch.labels) else logits.sum()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


def train(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Iterable[Any],
    *,
    schedulers: Sequence[LRScheduler] = (),
    max_steps: int | None = None,
    history: History | None = None,
    progress: Progress | None = None,
    metrics: MetricsWriter | None = None,
    stop: StopSignal | None = None,
) -> History:
    """Train ``model`` on every batch of all ranks, and leave it in training mode.

    Ranks take their steps together. A rank with fewer batches goes on with empty ones until the
    last rank is done. Each rank's loss is the mean over its own samples, and gradients are the mean
    over ranks, as in DDP, which is the model's to do (``shard_embeddings`` does it): a rank with
    fewer samples weighs as much as the others, an empty one adds zero.

    Args:
        model: called as ``model(dense, sparse)``, gives logits ``[B]`` or ``[B, 1]``.
        loss_fn: ``(logits [B], labels [B])`` to their mean loss.
        optimizers: all are stepped, in this order.
        batches: as for :func:`in_step`; of an iterator, or of ``Epochs``, at most ``max_steps``
            batches are taken, so that a later call goes on from there.
        schedulers: of learning rates; stepped after each step.
        max_steps: the same on every rank.
        history: what is continued; a new one by default.
        progress: advanced at each step.
        metrics: gets the loss whenever it is read, the learning rate of the first optimizer's last
            step, and the samples a second since the reading before.
        stop: where a rank was asked to stop, all of them end after the step that they are at; if
            that is before ``max_steps``, the loss is not read, so that the rest of the steps, from
            a checkpoint too, gives the points that all of them would have given.

    Raises:
        FloatingPointError: where the loss is not finite, when it is next read.
        ValueError, RuntimeError: as for :func:`in_step`.
    """
    history = History() if history is None else history
    model.train()
    meter, num_before = _Meter(history, progress, metrics), history.num_steps
    for batch in in_step(batches, device_of(model), max_steps, stop):
        loss = train_step(model, loss_fn, optimizers, batch)
        meter.add_step(loss, len(batch.labels), optimizers)
        for scheduler in schedulers:
            scheduler.step()
    is_cut_short = stop is not None and stop.is_agreed
    if not is_cut_short or history.num_steps - num_before == max_steps:
        meter.read_rest()
    meter.take_time()
    return history


class _Meter:
    """Tells the history what happens, and the others what the history reads."""

    def __init__(
        self, history: History, progress: Progress | None, metrics: MetricsWriter | None
    ) -> None:
        self.history, self.progress, self.metrics = history, progress, metrics
        self._since, self._num_samples = time.perf_counter(), history.num_samples
        self._lr: float | Tensor = math.nan

    def add_step(
        self, loss: Tensor, batch_size: int, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        if self.metrics is not None and optimizers:
            lr = optimizers[0].param_groups[0]["lr"]
            # Schedulers change a tensor in place.
            self._lr = lr.clone() if isinstance(lr, Tensor) else lr
        was_read = self.history.add_step(loss, batch_size)
        if self.progress is not None:
            self.progress.advance()
        if was_read:
            self._report()

    def read_rest(self) -> None:
        if self.history.read_loss():
            self._report()

    def take_time(self) -> float:
        seconds = time.perf_counter() - self._since
        self.history.seconds += seconds
        self._since += seconds
        return seconds

    def _report(self) -> None:
        seconds = self.take_time()
        loss = self.history.losses[-1].loss
        if self.progress is not None:
            self.progress.show(loss=loss)
        if self.metrics is not None:
            num_samples = self.history.num_samples - self._num_samples
            self.metrics.write(
                self.history.num_steps,
                loss=loss,
                lr=float(self._lr),
                samples_per_second=num_samples / seconds,
            )
        self._num_samples = self.history.num_samples
