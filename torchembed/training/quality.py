"""Quality of predictions: of clicks, and of each of several tasks."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from torchembed.data.batch import check_clicks
from torchembed.data.roc_auc import roc_auc
from torchembed.data.tasks import Task, TaskKind


class Evaluation(NamedTuple):
    """Quality of logits of clicks on held-out rows."""

    auc: float
    """Exact area under the ROC curve; NaN where all labels are equal."""
    logloss: float
    """Mean over the rows, natural logarithm."""
    num_rows: int

    @property
    def score(self) -> float:
        """The AUC: a number that is greater for better models."""
        return self.auc


class RegressionEvaluation(NamedTuple):
    """Quality of predicted numbers on held-out rows."""

    mse: float
    """Mean squared error."""
    r2: float
    """Coefficient of determination: 1 less the mean squared error's part of the labels' variance;
    NaN where all labels are equal."""
    num_rows: int

    @property
    def score(self) -> float:
        """R², a number that is greater for better models."""
        return self.r2


class TaskEvaluations(dict[str, Evaluation | RegressionEvaluation]):
    """Quality of each task, by its name, on the held-out rows whose label is known."""

    def score(self, task: str | None = None) -> float:
        """AUC of a binary task, R² of another one: what early stopping compares.

        Args:
            task: its name; None for the mean over all tasks.

        Raises:
            ValueError: for an unknown task.
        """
        if task is None:
            return sum(found.score for found in self.values()) / len(self)
        if task not in self:
            raise ValueError(
                f"task must be one of {list(self)}, or None for their mean, got {task!r}"
            )
        return self[task].score

    def scalars(self) -> dict[str, float]:
        """Each metric as ``task/metric``, for :class:`~torchembed.training.MetricsWriter`."""
        return {
            f"{task}/{metric}": value
            for task, found in self.items()
            for metric, value in found._asdict().items()
            if metric != "num_rows"
        }


def click_quality(logits: Tensor, labels: Tensor) -> Evaluation:
    """Compute AUC and log loss of ``logits [N]`` for ``labels [N]``, on the CPU, in float64, on one
    process.

    Raises:
        FloatingPointError: if a logit is not finite.
        ValueError: if there is no row, or a label is neither 0 nor 1.
    """
    _check_finite(logits, "logits")
    check_clicks(labels)
    logits, labels = logits.double(), labels.double()
    logloss = F.binary_cross_entropy_with_logits(logits, labels).item()
    return Evaluation(roc_auc(labels.numpy(), logits.numpy()), logloss, len(logits))


def regression_quality(predictions: Tensor, labels: Tensor) -> RegressionEvaluation:
    """Compute mean squared error and R² of ``predictions [N]`` for ``labels [N]`` in float64.

    Raises:
        FloatingPointError: if a prediction is not finite.
        ValueError: if there is no row, or a label is not finite.
    """
    _check_finite(predictions, "predictions")
    if not labels.isfinite().all():
        raise ValueError(f"labels must be finite, got {labels[~labels.isfinite()][0]:g}")
    predictions, labels = predictions.double(), labels.double()
    mse = F.mse_loss(predictions, labels).item()
    variance = labels.var(correction=0).item()
    return RegressionEvaluation(mse, 1 - mse / variance if variance else math.nan, len(labels))


def quality_of_tasks(columns: Tensor, tasks: Sequence[Task]) -> TaskEvaluations:
    """Compute the quality of each task.

    Args:
        columns: ``[N, 3 * len(tasks)]``: of each task its outputs, its labels and 1 where these are
            known, else 0.
        tasks: in this order.

    Raises:
        FloatingPointError, ValueError: as for one task, with its name.
    """
    found = TaskEvaluations()
    for task, (outputs, labels, known) in zip(tasks, columns.T.split(3), strict=True):
        rows = known.bool()
        compute = click_quality if task.kind is TaskKind.BINARY else regression_quality
        try:
            found[task.name] = compute(outputs[rows], labels[rows])
        except (ValueError, FloatingPointError) as error:
            raise type(error)(f"task {task.name}: {error}") from error
    return found


def _check_finite(outputs: Tensor, what: str) -> None:
    if not len(outputs):
        raise ValueError("there must be at least one held-out row, got none on any rank")
    num_bad = int((~outputs.isfinite()).sum())
    if num_bad:
        raise FloatingPointError(
            f"{num_bad} of {len(outputs)} {what} are not finite: training diverged; lower the "
            "learning rate, or look for bad dense features"
        )
