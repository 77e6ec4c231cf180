"""The loop: copy to the device, forward, loss, backward, step."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from torchembed.data.batch import Batch
from torchembed.training.batches import in_step
from torchembed.training.history import History
from torchembed.training.progress import Progress

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
        batches: as for :func:`in_step`; of an iterator at most ``max_steps`` batches are taken, so
            that a later call goes on from there.
        schedulers: of learning rates; stepped after each step.
        max_steps: the same on every rank.
        history: what is continued; a new one by default.
        progress: advanced at each step.

    Raises:
        FloatingPointError: where the loss is not finite, when it is next read.
        ValueError, RuntimeError: as for :func:`in_step`.
    """
    history = History() if history is None else history
    model.train()
    start = time.perf_counter()
    for batch in in_step(batches, device_of(model), max_steps):
        loss = train_step(model, loss_fn, optimizers, batch)
        for scheduler in schedulers:
            scheduler.step()
        was_read = history.add_step(loss, len(batch.labels))
        if progress is not None:
            progress.advance()
            if was_read:
                progress.show(loss=history.losses[-1].loss)
    history.read_loss()
    history.seconds += time.perf_counter() - start
    return history
