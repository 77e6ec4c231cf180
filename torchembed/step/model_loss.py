"""The loss of a model: how the model and the loss function are called for a batch."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchembed.core.trees import Tree, tensors_in
from torchembed.data.batch import (
    Batch,
    LabeledInputs,
    WeightedBatch,
    as_labeled_batch,
    as_probabilities,
)
from torchembed.data.tasks import task_labels
from torchembed.ops.binary_cross_entropy import binary_cross_entropy
from torchembed.step.batches.batch_layout import num_samples
from torchembed.step.multi_task_loss import MultiTaskLoss

LabelLoss: TypeAlias = Callable[..., Tensor]
"""``(output, labels)`` to their mean loss ``[]``, or ``(output, labels, weights)`` where batches
have weights of samples; never called for a batch without samples."""


@dataclasses.dataclass(frozen=True)
class BatchLoss:
    """A loss function of a model's output and the whole batch.

    ``TrainPipeline(model, BatchLoss(loss_fn), optimizers)`` calls ``model(batch)`` and
    ``loss_fn(output, batch)``, on batches of any form.
    """

    loss_fn: Callable[[Any, Any], Tensor]
    """``(output, batch)`` to their mean loss ``[]``; never called for a batch without samples."""

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise TypeError(
                f"loss_fn must be a function of (output, batch), got {type(self.loss_fn).__name__}"
            )


LossFunction: TypeAlias = LabelLoss | BatchLoss

ComputeLoss = Callable[[nn.Module, Tree], tuple[Tensor, Tree]]
"""A model and a batch on its device to the loss ``[]`` and the model's output."""

_OF_PROBABILITIES = (
    binary_cross_entropy,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)
_OF_CLASSES = (F.cross_entropy, F.nll_loss)


def check_loss_fn(loss_fn: object) -> None:
    """Raise ``TypeError`` where ``loss_fn`` is nothing that a pipeline takes."""
    if isinstance(loss_fn, type) or not (loss_fn is None or _is_callable(loss_fn)):
        name = loss_fn.__name__ if isinstance(loss_fn, type) else type(loss_fn).__name__
        made = f"; make one: {name}()" if isinstance(loss_fn, type) else ""
        raise TypeError(
            "loss_fn must be a function of (output, labels), BatchLoss of a function of "
            f"(output, batch), or None where the model gives its loss, got {name}{made}"
        )


def _is_callable(loss_fn: object) -> bool:
    return callable(loss_fn) or isinstance(loss_fn, BatchLoss)


def takes_probabilities(loss_fn: LossFunction | None) -> bool:
    """True for the binary cross entropies of torch and torchembed, whose labels are from 0 to 1."""
    if isinstance(loss_fn, functools.partial):
        return takes_probabilities(loss_fn.func)
    of_torch = isinstance(loss_fn, (nn.BCELoss, nn.BCEWithLogitsLoss))
    return of_torch or loss_fn in _OF_PROBABILITIES


def _takes_classes(loss_fn: object) -> bool:
    """True for torch's losses of one class for each sample, whose labels are whole numbers."""
    if isinstance(loss_fn, functools.partial):
        return _takes_classes(loss_fn.func)
    return isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)) or loss_fn in _OF_CLASSES


def convert_batch(item: object, loss_fn: LossFunction | None) -> Tree:
    """A batch that was read in the form that the model and ``loss_fn`` are called for.

    Raises:
        TypeError, ValueError: if ``loss_fn`` cannot be called for it.
    """
    if loss_fn is None or isinstance(loss_fn, BatchLoss):
        return item
    batch = as_labeled_batch(item)
    if isinstance(batch, WeightedBatch) and loss_fn in _OF_CLASSES:
        raise TypeError(
            "the third argument of cross_entropy and nll_loss is a weight of each class, and not "
            "of samples; give a loss_fn(output, labels, weights) that weights samples itself"
        )
    if isinstance(loss_fn, MultiTaskLoss):
        return batch._replace(labels=task_labels(batch.labels, loss_fn.tasks))
    if not takes_probabilities(loss_fn):
        return batch
    labels = batch.labels
    if not isinstance(labels, Tensor):
        raise TypeError(
            f"a binary cross entropy takes one tensor of labels, got {type(labels).__name__}; give "
            "MultiTaskLoss(tasks), or a loss_fn(output, labels) that computes the loss of each task"
        )
    if batch is not item:
        labels = as_probabilities(labels)
    if labels.dtype == torch.float32:
        return batch if labels is batch.labels else batch._replace(labels=labels)
    return batch._replace(labels=labels.to(torch.float32))


def loss_and_output(
    model: nn.Module, batch: Tree, *, loss_fn: LossFunction | None, autocast: torch.autocast
) -> tuple[Tensor, Tree]:
    """The loss ``[]`` and the output of ``model`` for ``batch``, within ``autocast``.

    A batch without samples has the loss 0 and gives zero gradients, but where the model computes
    its loss.

    Raises:
        TypeError, ValueError: if the model or ``loss_fn`` gives no loss.
    """
    with autocast:
        if loss_fn is None:
            return _loss_of(model(batch))
        is_empty = num_samples(batch) == 0  # before the model, which may take parts out
        output = _output_of(model, batch, loss_fn)
        if is_empty:
            return _zero_of(output), output
        if isinstance(loss_fn, BatchLoss):
            loss = loss_fn.loss_fn(output, batch)
        else:
            weights = (batch.weights,) if isinstance(batch, WeightedBatch) else ()
            loss, output = _loss_of_labels(output, batch.labels, weights, loss_fn)
        return _checked(loss, "loss_fn"), output


def _output_of(model: nn.Module, batch: Tree, loss_fn: LossFunction) -> Tree:
    if isinstance(loss_fn, BatchLoss):
        return model(batch)
    if isinstance(batch, LabeledInputs):
        return model(batch.inputs)
    assert isinstance(batch, (Batch, WeightedBatch))
    return model(batch.dense, batch.sparse)


def _loss_of_labels(
    output: Tree, labels: Tree, weights: tuple[Tensor, ...], loss_fn: LabelLoss
) -> tuple[object, Tree]:
    """The result of ``loss_fn``, and the output in the shape in which it was given it."""
    alike = _alike(output, labels, loss_fn)
    if alike is None:
        if takes_probabilities(loss_fn):
            _check_shapes(output, labels)
        return loss_fn(output, labels, *weights), output
    try:
        return loss_fn(*alike, *weights), alike[0]
    except IndexError:
        # It brings them to one shape itself, as by output[:, 0] or output.squeeze(1).
        return loss_fn(output, labels, *weights), output


def _alike(output: Tree, labels: Tree, loss_fn: LabelLoss) -> tuple[Tensor, Tensor] | None:
    """Output and labels, where one of them is ``[..., 1]``, in the shape of the other one without
    it; None elsewhere.

    Most losses would broadcast the two to all pairs. Losses of classes take an output for each
    class, also where there is one class.
    """
    if not (isinstance(output, Tensor) and isinstance(labels, Tensor)) or _takes_classes(loss_fn):
        return None
    if output.shape == (*labels.shape, 1):
        return output.squeeze(-1), labels
    if labels.shape == (*output.shape, 1):
        return output, labels.squeeze(-1)
    return None


def _check_shapes(output: Tree, labels: Tree) -> None:
    """Raise ``ValueError`` where a binary cross entropy gets no label for each output."""
    if isinstance(output, Tensor) and isinstance(labels, Tensor) and output.shape != labels.shape:
        raise ValueError(
            "labels must be one for each output of the model for a binary cross entropy, "
            f"{list(output.shape)}, got {list(labels.shape)}; give a column of labels for each "
            "output, or a loss_fn(output, labels) that brings them to one shape"
        )


def _loss_of(result: Tree) -> tuple[Tensor, Tree]:
    """The loss and the output in what a model that computes its loss gives."""
    if isinstance(result, Tensor):
        return _checked(result, "the model"), None
    if isinstance(result, Mapping):
        loss, output = result.get("loss", result), result
    elif isinstance(result, (tuple, list)) and len(result) > 0:
        loss, output = result[0], result[1] if len(result) == 2 else result[1:]
    else:
        # Without a loss the error names what the model gave.
        loss, output = getattr(result, "loss", result), None
    return _checked(loss, "the model"), output


def _checked(loss: object, whose: str) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{whose} must give the loss: a tensor []"
            f"{', the first of a tuple or list, or named loss' if whose == 'the model' else ''}, "
            f"got {type(loss).__name__}; give loss_fn where the model gives outputs"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"{whose} must give one loss [] for the batch, got {list(loss.shape)}; take its mean, "
            "or give loss_fn where that is the model's output"
        )
    return loss.reshape(())


def _zero_of(output: Tree) -> Tensor:
    """A loss of 0 that gives zero gradients, of an output without samples."""
    sums = [tensor.sum() for tensor in tensors_in(output) if tensor.is_floating_point()]
    return functools.reduce(torch.add, sums)
