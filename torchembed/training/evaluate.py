"""AUC and log loss over the held-out rows of all ranks."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchembed.core import ranks
from torchembed.training.batches import in_step
from torchembed.training.stop import StopSignal


class Evaluation(NamedTuple):
    """How a model does on held-out rows."""

    auc: float
    """Exact area under the ROC curve; NaN where all labels are equal."""
    logloss: float
    """Mean over the rows, natural logarithm."""
    num_rows: int


@overload
def evaluate(model: nn.Module, batches: Iterable[Any]) -> Evaluation: ...


@overload
def evaluate(
    model: nn.Module, batches: Iterable[Any], *, stop: StopSignal
) -> Evaluation | None: ...


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Any], *, stop: StopSignal | None = None
) -> Evaluation | None:
    """AUC and log loss of ``model`` over the batches of all ranks; every rank gets the result.

    Modules are in evaluation mode meanwhile, and each in its own again after. Logits and labels of
    all rows are kept on the device, then on the CPU of rank 0.

    Args:
        model: as for :func:`train`.
        batches: as for :func:`in_step`.
        stop: where a rank was asked to stop, all of them end after the batch that they are at, and
            the result is None.

    Raises:
        FloatingPointError: where a logit is not finite.
        ValueError: where there is no row.
    """
    logits, labels = [], []
    device = next(model.parameters()).device
    with _evaluation_mode(model):
        for batch in in_step(batches, device, stop=stop):
            logits.append(model(batch.dense, batch.sparse).reshape(-1).float())
            labels.append(batch.labels)
    if stop is not None and stop.is_agreed:
        return None
    empty = torch.empty(0, device=device)
    local = torch.stack([torch.cat([empty, *logits]), torch.cat([empty, *labels])], dim=1).cpu()
    rows = ranks.gather_on_first_rank(local)
    # A failure on rank 0 is everyone's, or the others would wait.
    result = ranks.from_first_rank(None if rows is None else _try_metrics(*rows.unbind(1)))
    if isinstance(result, Exception):
        raise result
    return result


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Each module gets its own mode back, which may not be that of ``model``."""
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
    """AUC and log loss of ``logits [N]`` for ``labels [N]``, in float64, on one process."""
    from torchmetrics.functional.classification import binary_auroc

    if not len(logits):
        raise ValueError("there must be at least one held-out row, got none on any rank")
    num_bad = int((~logits.isfinite()).sum())
    if num_bad:
        raise FloatingPointError(
            f"{num_bad} of {len(logits)} logits are not finite: training diverged; lower the "
            "learning rate, or look for bad dense features"
        )
    logits, labels = logits.double(), labels.double()
    logloss = F.binary_cross_entropy_with_logits(logits, labels).item()
    auc = math.nan
    if 0 < labels.sum() < len(labels):
        auc = binary_auroc(logits.sigmoid(), labels.long(), thresholds=None).item()
    return Evaluation(auc, logloss, len(logits))
