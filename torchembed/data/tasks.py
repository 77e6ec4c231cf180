"""Tasks that one model learns together, and labels of batches by their names."""

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from torchembed.core.trees import Tree


class TaskKind(enum.Enum):
    """Kind of labels, and with it loss and metrics."""

    BINARY = "binary"
    """Labels from 0 to 1, and outputs are logits: binary cross entropy; AUC and log loss."""
    REGRESSION = "regression"
    """Labels are any numbers, and outputs predict them: squared error; its mean and R²."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One of the tasks of a model whose outputs are a mapping by name, as are a batch's labels."""

    name: str
    """The key of its output and of its labels."""
    kind: TaskKind
    weight: float = 1.0
    """Factor of its loss."""
    mask: str | None = None
    """The key in the labels of a tensor ``[B]`` that is True, or 1, where its label is known; None
    where all are. Other labels count nowhere and may be anything, NaN too."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a string that is not empty, got {self.name!r}")
        if not isinstance(self.kind, TaskKind):
            raise TypeError(f"kind of task {self.name} must be a TaskKind, got {self.kind!r}")
        if not 0 < self.weight < math.inf:
            raise ValueError(
                f"weight of task {self.name} must be a number above 0, got {self.weight}; leave "
                "out a task that is not to be trained"
            )


def checked_tasks(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """``tasks`` as a tuple.

    Raises:
        TypeError: if one is no ``Task``.
        ValueError: if there is none, two have one name, or a mask has the name of a task.
    """
    found = tuple(tasks)
    for task in found:
        if not isinstance(task, Task):
            raise TypeError(f"tasks must be Tasks, got {type(task).__name__}: {task!r}")
    names = [task.name for task in found]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"tasks must be at least one, each with a name of its own, got {names}")
    for task in found:
        if task.mask in names:
            raise ValueError(
                f"mask of task {task.name} must be no task's labels, got {task.mask!r}, and "
                f"tasks are {names}"
            )
    return found


def task_labels(labels: Tree, tasks: Sequence[Task]) -> dict[str, Tensor]:
    """The labels of each task, float32 ``[B]``, and masks, bool ``[B]``, by their names.

    Args:
        labels: a mapping with tensors ``[B]`` or ``[B, 1]`` of any dtype, one for each task and
            mask, and no others.
        tasks: all of the model.

    Raises:
        TypeError: if it is no mapping of tensors.
        ValueError: for a task or mask without labels, labels without a task, and labels of another
            shape; where labels are on the CPU, also for one that is out of the task's range, and
            for masks that are neither 0 nor 1. On a GPU that check would make the host wait.
    """
    masks = {task.mask for task in tasks if task.mask is not None}
    names = [task.name for task in tasks]
    if not isinstance(labels, Mapping):
        raise TypeError(
            f"labels must be a mapping with a tensor for each of the tasks {names}, got "
            f"{type(labels).__name__}"
        )
    missing = [name for name in (*names, *sorted(masks)) if name not in labels]
    if missing:
        raise ValueError(
            f"labels must have one tensor for each of the tasks {names}"
            f"{f' and masks {sorted(masks)}' if masks else ''}, got {list(labels)} without "
            f"{missing}; add the labels, or leave the tasks out"
        )
    unknown = [name for name in labels if name not in names and name not in masks]
    if unknown:
        raise ValueError(
            f"labels must be of the tasks {names}, got some of unknown tasks {unknown}; add a Task "
            "for each, or leave the labels out"
        )
    found = {name: _as_mask(labels[name], name) for name in sorted(masks)}
    for task in tasks:
        known = None if task.mask is None else found[task.mask]
        found[task.name] = _as_labels(labels[task.name], task, known)
    return found


def _as_column(labels: object, what: str) -> Tensor:
    """``labels`` as ``[B]``."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"{what} must be a tensor [B], got {type(labels).__name__}")
    if labels.dim() != 1 and not (labels.dim() == 2 and labels.shape[1] == 1):
        raise ValueError(f"{what} must be [B] or [B, 1], got {list(labels.shape)}")
    return labels.reshape(-1)


def _as_mask(labels: object, name: str) -> Tensor:
    mask = _as_column(labels, f"mask {name}")
    if mask.dtype != torch.bool and mask.device.type == "cpu":
        _check_each(mask, (mask == 0) | (mask == 1), f"mask {name} must be bool, or 0 or 1")
    return mask.bool()


def _as_labels(labels: object, task: Task, known: Tensor | None) -> Tensor:
    found = _as_column(labels, f"labels of task {task.name}")
    if known is not None and len(known) != len(found):
        raise ValueError(
            f"labels of task {task.name} must be as many as those of its mask {task.mask}, "
            f"{len(known)}, got {len(found)}"
        )
    if found.device.type == "cpu":
        if task.kind is TaskKind.BINARY:
            is_good, needed = (found >= 0) & (found <= 1), "from 0 to 1, of a binary task"
        else:
            is_good, needed = found.isfinite(), "finite"
        if known is not None:
            is_good = is_good | ~known
        what = f"labels of task {task.name} must be {needed}"
        _check_each(found, is_good, f"{what}, or left out by a mask")
    return found.to(torch.float32)


def _check_each(values: Tensor, is_good: Tensor, what: str) -> None:
    """Raise ``ValueError`` with the first of ``values [B]`` that is not good."""
    if not is_good.all():
        sample = int((~is_good).int().argmax())
        raise ValueError(f"{what}, got {values[sample]:g} for sample {sample}")
