"""Steps of a pipeline beside those of a plain loop, bit for bit."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.tiny_training import assert_same_state, state_of
from torchembed.training import StepKind, TrainPipeline

Optimizers = Sequence[torch.optim.Optimizer]


def losses_by_hand(
    model: nn.Module,
    optimizers: Optimizers,
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
) -> list[float]:
    """The loss of each step of a plain loop."""
    losses = []
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def captured_as_by_hand(
    make: Callable[[], nn.Module],
    make_optimizers: Callable[[nn.Module], Optimizers],
    batches: Sequence[Any],
    loss_fn: Any,
    loss_of: Callable[[nn.Module, Any], Tensor],
    **settings: Any,
) -> tuple[list[StepKind], TrainPipeline]:
    """The kinds of a pipeline's steps on ``batches``, whose losses and states are those of
    ``loss_of`` in a plain loop, and the pipeline; ``settings`` are its own."""
    plain, model = make(), make()
    of_plain, of_model = make_optimizers(plain), make_optimizers(model)
    torch.manual_seed(1)
    losses = losses_by_hand(plain, of_plain, batches, loss_of)
    torch.manual_seed(1)
    with TrainPipeline(model, loss_fn, of_model, capture=True, **settings) as pipeline:
        iterator, found, kinds = iter(batches), [], []
        for _ in batches:
            result = pipeline.progress(iterator)
            # Now: a replay to come writes over it.
            found.append(result.loss.item())
            kinds.append(result.kind)
    assert found == losses
    assert_same_state(model, state_of(plain))
    return kinds, pipeline
