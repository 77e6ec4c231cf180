"""``MultiTaskLoss``: the weighted sum of the losses of several tasks."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchembed.core.trees import Tree
from torchembed.data.tasks import Task, TaskKind, checked_tasks


@dataclasses.dataclass(frozen=True)
class MultiTaskLoss:
    """The sum of the tasks' mean losses, each times the weight of its task.

    ``TrainPipeline(model, MultiTaskLoss(tasks), optimizers)`` trains a model whose output is a
    mapping with a tensor ``[B]`` or ``[B, 1]`` for each task, on batches whose labels are one, as
    :func:`~torchembed.data.tasks.task_labels` takes them. A task's loss is the mean over the
    samples whose label is known, and 0 where none is; weights of samples, where batches have them,
    are factors of its terms.
    """

    tasks: Sequence[Task]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", checked_tasks(self.tasks))

    def __call__(
        self, output: Tree, labels: Mapping[str, Tensor], weights: Tensor | None = None
    ) -> Tensor:
        """Compute the loss ``[]``.

        Args:
            output: the model's: logits of binary tasks and predictions of others, by name. Outputs
                without a task are left alone.
            labels: as :func:`~torchembed.data.tasks.task_labels` gives them.
            weights: of samples, ``[B]`` or ``[B, 1]``.

        Raises:
            TypeError: if the output is no mapping.
            ValueError: if it has none for a task, or one of another shape.
        """
        losses = self.by_task(output, labels, weights)
        return torch.stack([task.weight * losses[task.name] for task in self.tasks]).sum()

    def by_task(
        self, output: Tree, labels: Mapping[str, Tensor], weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The mean loss ``[]`` of each task, without its weight; arguments as for the call."""
        return {
            task.name: _mean_loss(
                task, task_output(output, task, labels[task.name]), labels, weights
            )
            for task in self.tasks
        }


def task_output(output: Tree, task: Task, labels: Tensor) -> Tensor:
    """The output of a model for a task, float32 ``[B]`` as its labels.

    Raises:
        TypeError: if ``output`` is no mapping.
        ValueError: if it has none for the task, or one of another shape.
    """
    if not isinstance(output, Mapping):
        raise TypeError(
            f"the model must give a mapping with an output for each task, got "
            f"{type(output).__name__} and no output of task {task.name}"
        )
    found = output.get(task.name)
    if found is None:
        raise ValueError(
            f"the model must give an output for each task, got {list(output)} without task "
            f"{task.name}"
        )
    if found.shape != labels.shape and found.shape != (*labels.shape, 1):
        raise ValueError(
            f"the output of task {task.name} must be [B] or [B, 1] for labels "
            f"{list(labels.shape)}, got {list(found.shape)}"
        )
    return found.reshape(-1).float()


def _mean_loss(
    task: Task, output: Tensor, labels: Mapping[str, Tensor], weights: Tensor | None
) -> Tensor:
    expected = labels[task.name]
    known = None if task.mask is None else labels[task.mask]
    if known is not None:
        # Before the loss: no factor makes a gradient of NaN 0.
        expected = expected.where(known, 0.0)
    if task.kind is TaskKind.BINARY:
        losses = F.binary_cross_entropy_with_logits(output, expected, reduction="none")
    else:
        losses = F.mse_loss(output, expected, reduction="none")
    if weights is not None:
        losses = losses * weights.reshape(-1)
    if known is None:
        return losses.mean()
    return losses.where(known, 0.0).sum() / known.sum().clamp(min=1)
