"""A tiny model trained by a loop by hand and by a pipeline, and its state."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.tiny_model import (
    TinyModel,
    make_optimizers,
    step_by_hand,
)
from torchembed.data import Batch
from torchembed.training import TrainPipeline

LOSS = F.binary_cross_entropy_with_logits


def make_model(device: torch.device) -> TinyModel:
    return TinyModel(is_deep=True).to(device)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.to(expected[name].device), expected[name]), name


def by_hand(batches: Sequence[Batch], device: torch.device) -> tuple[list[float], Any]:
    """Losses and the state after training on ``batches`` with a plain loop."""
    model = make_model(device)
    optimizers = make_optimizers(model)
    losses = [step_by_hand(model, LOSS, optimizers, batch.to(device)).item() for batch in batches]
    return losses, state_of(model)


def losses_of(pipeline: TrainPipeline, batches: Sequence[Any]) -> Iterator[Tensor]:
    """The loss of each step; nothing waits for it here."""
    iterator = iter(batches)
    with pytest.raises(StopIteration):  # noqa: PT012 - how a pipeline says that it is done
        while True:
            yield pipeline.progress(iterator).loss.clone()


def results_of(pipeline: TrainPipeline, batches: Sequence[Any]) -> list[float]:
    return [loss.item() for loss in list(losses_of(pipeline, batches))]
