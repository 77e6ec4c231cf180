"""AUC and log loss over the held-out rows of all ranks."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchembed.core import ranks
from torchembed.core.trees import Tree
from torchembed.data.batch import Batch, LabeledInputs, as_labeled_batch, check_clicks
from torchembed.tables import model_device
from torchembed.training.batches import in_step
from torchembed.training.stop import StopSignal

_GIVE = "give predictions=lambda output, batch: (logits, labels)"


class Evaluation(NamedTuple):
    """Quality of a model on held-out rows."""

    auc: float
    """Exact area under the ROC curve; NaN where all labels are equal."""
    logloss: float
    """Mean over the rows, natural logarithm."""
    num_rows: int


Predictions = Callable[[Any, Any], tuple[Tensor, Tensor]]
"""``(output, batch)`` to logits and labels, each ``[N]`` or of one shape with as many elements."""


@overload
def evaluate(
    model: nn.Module, batches: Iterable[object], *, predictions: Predictions | None = None
) -> Evaluation: ...


@overload
def evaluate(
    model: nn.Module,
    batches: Iterable[object],
    *,
    predictions: Predictions | None = None,
    stop: StopSignal,
) -> Evaluation | None: ...


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[object],
    *,
    predictions: Predictions | None = None,
    stop: StopSignal | None = None,
) -> Evaluation | None:
    """Compute AUC and log loss of ``model`` over the batches of all ranks; every rank gets both.

    Modules are in evaluation mode meanwhile, and each is then set back to its own mode. Logits and
    labels of all rows are kept on the device, then on the CPU of rank 0.

    Args:
        model: gives one logit for each sample; called as ``model(dense, sparse)`` or, for batches
            ``(inputs, labels)``, as ``model(inputs)``. With ``predictions`` it is called as
            ``model(batch)`` and may give anything.
        batches: as for :func:`in_step`; or ``(inputs, labels)`` and, with ``predictions``, batches
            of any form that :class:`TrainPipeline` takes, of which every rank has equally many.
            torchmetrics must be installed.
        predictions: ``(output, batch)`` to logits and labels, for models that are trained with
            ``BatchLoss`` or give their loss: ``lambda output, batch: (output["logits"],
            batch["label"])``. The batch is as the model left it.
        stop: once a rank is asked to stop, all ranks end after their current batch, and the result
            is None.

    Raises:
        FloatingPointError: where a logit is not finite.
        TypeError: for batches of another form, and where ``predictions`` gives no two tensors.
        ValueError: where there is no row, a label is neither 0 nor 1, or there is not one logit for
            each label.
    """
    logits, labels = [], []
    device = model_device(model)
    with _evaluation_mode(model):
        convert = _as_evaluated if predictions is None else _as_it_is
        for batch in in_step(batches, device, stop=stop, convert=convert):
            if predictions is None:
                output, of_batch = _predicted(model, batch)
            else:
                output, of_batch = _checked(predictions(model(batch), batch))
            logits.append(output.reshape(-1).float().to(device))
            labels.append(of_batch.reshape(-1).float().to(device))
    if stop is not None and stop.is_agreed:
        return None
    empty = torch.empty(0, device=device)
    local = torch.stack([torch.cat([empty, *logits]), torch.cat([empty, *labels])], dim=1).cpu()
    rows = ranks.gather_on_first_rank(local)
    # An error on rank 0 is sent as a result: the others are waiting for one.
    result = ranks.from_first_rank(None if rows is None else _try_metrics(*rows.unbind(1)))
    if isinstance(result, Exception):
        raise result
    return result


def _as_it_is(item: object) -> Tree:
    return item


def _as_evaluated(item: object) -> Batch | LabeledInputs:
    try:
        batch = as_labeled_batch(item)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{error}. To evaluate a model that is called with the whole batch, {_GIVE}"
        ) from error
    if isinstance(batch, (Batch, LabeledInputs)):
        return batch
    raise TypeError(
        "a batch to evaluate must be (dense, sparse, labels) or (inputs, labels), got weights of "
        "samples as well; leave them out"
    )


def _predicted(model: nn.Module, batch: Batch | LabeledInputs) -> tuple[Tensor, Tensor]:
    """The logits of ``model``, and labels."""
    if isinstance(batch, LabeledInputs):
        output = model(batch.inputs)
    else:
        output = model(batch.dense, batch.sparse)
    labels = torch.as_tensor(batch.labels)
    if not isinstance(output, Tensor) or output.numel() != labels.numel():
        given = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            "model must give one logit for each of the labels, of shape "
            f"{list(labels.shape)}, got {given}; wrap it in a module that gives the logits to "
            f"evaluate. Where it is called with the whole batch, {_GIVE}"
        )
    return output, labels


def _checked(found: object) -> tuple[Tensor, Tensor]:
    """Logits and labels that ``predictions`` gave."""
    parts = found if isinstance(found, (tuple, list)) else (found,)
    if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
        given = ", ".join(type(part).__name__ for part in parts)
        raise TypeError(f"predictions must give two tensors, (logits, labels), got {given}")
    logits, labels = parts
    if logits.numel() != labels.numel():
        raise ValueError(
            "predictions must give one logit for each label, got logits "
            f"{list(logits.shape)} and labels {list(labels.shape)}"
        )
    return logits, labels


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set ``model`` to evaluation; afterwards each module gets its own mode back, which may differ
    from the mode of ``model``."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def _try_metrics(logits: Tensor, labels: Tensor) -> Evaluation | Exception:
    try:
        return metrics(logits, labels)
    except (ValueError, FloatingPointError) as error:
        return error


def metrics(logits: Tensor, labels: Tensor) -> Evaluation:
    """Compute AUC and log loss of ``logits [N]`` for ``labels [N]`` in float64, on one process."""
    from torchmetrics.functional.classification import binary_auroc

    if not len(logits):
        raise ValueError("there must be at least one held-out row, got none on any rank")
    num_bad = int((~logits.isfinite()).sum())
    if num_bad:
        raise FloatingPointError(
            f"{num_bad} of {len(logits)} logits are not finite: training diverged; lower the "
            "learning rate, or look for bad dense features"
        )
    check_clicks(labels)
    logits, labels = logits.double(), labels.double()
    logloss = F.binary_cross_entropy_with_logits(logits, labels).item()
    auc = math.nan
    if 0 < labels.sum() < len(labels):
        auc = binary_auroc(logits.sigmoid(), labels.long(), thresholds=None).item()
    return Evaluation(auc, logloss, len(logits))
