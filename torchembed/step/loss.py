"""The loss of a model for a batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchembed.data.batch import Batch

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""``(logits [B], labels [B])`` to their mean loss ``[]``; never called with ``B = 0``."""

ComputeLoss = Callable[[nn.Module, Any], tuple[Tensor, Any]]
"""A model and a batch on its device to the loss ``[]`` and the model's output."""


def loss_and_output(
    model: nn.Module, batch: Any, *, loss_fn: LossFunction | None, autocast: torch.autocast
) -> tuple[Tensor, Any]:
    """The loss ``[]`` and the output of ``model`` for ``batch``, within ``autocast``.

    An empty batch has the loss 0 and gives zero gradients. Without ``loss_fn`` the model computes
    its loss: it is called as ``model(batch)`` and gives that, or a tuple of it and an output.
    """
    with autocast:
        if loss_fn is None:
            result = model(batch)
            return result if isinstance(result, tuple) else (result, None)
        logits = logits_of(model, batch)
        loss = loss_fn(logits, batch.labels) if len(batch.labels) else logits.sum()
        return loss, logits


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """``model(dense, sparse)`` as ``[B]``."""
    return model(batch.dense, batch.sparse).reshape(len(batch.labels))
