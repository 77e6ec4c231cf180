"""Quality of a model over the held-out rows of all ranks: of clicks, or of each task."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from torchembed.core import ranks
from torchembed.core.trees import Tree
from torchembed.data.batch import Batch, LabeledInputs, as_labeled_batch
from torchembed.data.tasks import Task, checked_tasks, task_labels
from torchembed.step.multi_task_loss import task_output
from torchembed.tables import model_device
from torchembed.training.batches import in_step
from torchembed.training.quality import (
    Evaluation,
    TaskEvaluations,
    click_quality,
    quality_of_tasks,
)
from torchembed.training.stop import StopSignal

_GIVE = "give predictions=lambda output, batch: (logits, labels)"

Predictions = Callable[[Any, Any], tuple[Any, Any]]
"""``(output, batch)`` to logits and labels, each ``[N]`` or of one shape with as many elements; of
several tasks to outputs and labels by name."""


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


@overload
def evaluate(
    model: nn.Module,
    batches: Iterable[object],
    *,
    tasks: Sequence[Task],
    predictions: Predictions | None = None,
) -> TaskEvaluations: ...


@overload
def evaluate(
    model: nn.Module,
    batches: Iterable[object],
    *,
    tasks: Sequence[Task],
    predictions: Predictions | None = None,
    stop: StopSignal,
) -> TaskEvaluations | None: ...


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[object],
    *,
    tasks: Sequence[Task] | None = None,
    predictions: Predictions | None = None,
    stop: StopSignal | None = None,
) -> Evaluation | TaskEvaluations | None:
    """Compute the quality of ``model`` over the batches of all ranks; collective.

    For a model of clicks, whose outputs are logits, that is AUC and log loss. With ``tasks`` it is
    AUC and log loss of each binary task, and mean squared error and R² of each regression. All
    ranks get the same result. Modules are in evaluation mode during the call, and are then set back
    to their own modes. Outputs and labels of all rows are kept on the device, then on the CPU of
    rank 0. Needs scikit-learn (``pip install 'torchembed[recipes]'``).

    Args:
        model: returns a logit for each sample, ``[B]`` or ``[B, 1]``, or with ``tasks`` a mapping
            with one for each task. It is called as ``model(dense, sparse)`` or, for batches
            ``(inputs, labels)``, as ``model(inputs)``. With ``predictions`` it is called as
            ``model(batch)`` and may return anything.
        batches: as for :func:`in_step`, or ``(inputs, labels)``. With ``predictions`` they have any
            form that :class:`TrainPipeline` takes, and are equally many on all ranks.
        tasks: the tasks of a model of several; labels are then a mapping, as for
            :class:`~torchembed.training.MultiTaskLoss`, and those of binary tasks are 0 or 1.
        predictions: maps ``(output, batch)`` to logits and labels, for models that are trained with
            ``BatchLoss`` or return their loss: ``lambda output, batch: (output["logits"],
            batch["label"])``. The batch is as the model left it. With ``tasks`` both are mappings.
        stop: once a rank is asked to stop, all ranks end after their current batch, and the result
            is None.

    Raises:
        FloatingPointError: if an output is not finite.
        TypeError: for batches of another form, where ``predictions`` gives no two tensors, and
            where outputs or labels of tasks are no mappings.
        ValueError: if there is no row, a label of a click is neither 0 nor 1, or there is not
            one output for each label; for a task without outputs or labels, and for labels of an
            unknown task.
    """
    of_tasks = None if tasks is None else checked_tasks(tasks)
    num_columns = 2 if of_tasks is None else 3 * len(of_tasks)
    device = model_device(model)
    local = [torch.empty(0, num_columns, device=device)]
    with _evaluation_mode(model):
        convert = _as_evaluated if predictions is None else _as_it_is
        for batch in in_step(batches, device, stop=stop, convert=convert):
            if predictions is None:
                output, labels = _called(model, batch), batch.labels
            else:
                output, labels = _two_parts(predictions(model(batch), batch), of_tasks is not None)
            if of_tasks is None:
                columns = _columns(output, labels, is_predicted=predictions is not None)
            else:
                columns = _columns_of_tasks(output, labels, of_tasks)
            local.append(torch.stack([c.reshape(-1).float().to(device) for c in columns], dim=1))
    if stop is not None and stop.is_agreed:
        return None
    rows = ranks.gather_on_first_rank(torch.cat(local).cpu())
    # An error on rank 0 is sent as a result: the others are waiting for one.
    result = ranks.from_first_rank(None if rows is None else _try_quality(rows, of_tasks))
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


def _called(model: nn.Module, batch: Batch | LabeledInputs) -> Tree:
    """The output of ``model``."""
    if isinstance(batch, LabeledInputs):
        return model(batch.inputs)
    return model(batch.dense, batch.sparse)


def _two_parts(found: object, are_of_tasks: bool) -> tuple[Tree, Tree]:
    """Results of ``predictions``."""
    parts = found if isinstance(found, (tuple, list)) else (found,)
    if len(parts) != 2 or not (are_of_tasks or all(isinstance(part, Tensor) for part in parts)):
        given = ", ".join(type(part).__name__ for part in parts)
        wanted = "outputs and labels by name" if are_of_tasks else "two tensors, (logits, labels)"
        raise TypeError(f"predictions must give {wanted}, got {given}")
    return parts[0], parts[1]


def _columns(output: Tree, labels: Tree, *, is_predicted: bool) -> tuple[Tensor, Tensor]:
    """Logits and labels of clicks, as many of each."""
    labels = torch.as_tensor(labels)
    if isinstance(output, Tensor) and output.numel() == labels.numel():
        return output, labels
    given = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if is_predicted:
        raise ValueError(
            f"predictions must give one logit for each label, got logits {given} and labels "
            f"{list(labels.shape)}"
        )
    raise ValueError(
        "model must give one logit for each of the labels, of shape "
        f"{list(labels.shape)}, got {given}; wrap it in a module that gives the logits to "
        f"evaluate, or give tasks. Where it is called with the whole batch, {_GIVE}"
    )


def _columns_of_tasks(output: Tree, labels: Tree, tasks: Sequence[Task]) -> list[Tensor]:
    """Each task's output, its labels, and where these are known."""
    of_tasks = task_labels(labels, tasks)
    columns: list[Tensor] = []
    for task in tasks:
        expected = of_tasks[task.name]
        known = torch.ones_like(expected) if task.mask is None else of_tasks[task.mask]
        columns += [task_output(output, task, expected), expected, known]
    return columns


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


def _try_quality(
    rows: Tensor, tasks: Sequence[Task] | None
) -> Evaluation | TaskEvaluations | Exception:
    try:
        return click_quality(*rows.unbind(1)) if tasks is None else quality_of_tasks(rows, tasks)
    except (ValueError, FloatingPointError) as error:
        return error
