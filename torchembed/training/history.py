"""The history of a training run: losses, evaluations, samples and time."""

import collections
import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from torchembed.core.ranks import rank, sum_over_ranks, world_size
from torchembed.training.quality import Evaluation, RegressionEvaluation, TaskEvaluations


class LossPoint(NamedTuple):
    """Mean loss over the samples of all ranks since the previous point."""

    step: int
    loss: float


class HeldOutPoint(NamedTuple):
    """Evaluation on held-out rows after ``step`` steps."""

    step: int
    evaluation: Evaluation | TaskEvaluations


class _Reading(NamedTuple):
    """A sum of losses that is being copied from the device."""

    step: int
    num_steps: int
    num_samples: int
    loss_sum: Tensor
    arrived: torch.cuda.Event | None


_STEPS_OF_READING = 3
"""Steps after which a copy has surely arrived: a pipeline's host is never that far ahead."""


@dataclasses.dataclass
class History:
    """The steps of a training run; equal on every rank.

    Losses are summed on the device, and the sum over all ranks is read once in ``read_loss_every``
    steps. A GPU's sum is copied without waiting, and its point is added three steps later.
    """

    read_loss_every: int = 50
    num_steps: int = 0
    num_samples: int = 0
    """Samples of all ranks up to the last reading of the loss."""
    seconds: float = 0.0
    """Seconds of training, without evaluations."""
    losses: list[LossPoint] = dataclasses.field(default_factory=list)
    held_out: list[HeldOutPoint] = dataclasses.field(default_factory=list)
    _loss_sum: Tensor | None = None
    _unread_samples: int = 0
    """Samples of this rank since the last reading; ``_unread_steps`` is the same on all ranks."""
    _unread_steps: int = 0
    _readings: collections.deque[_Reading] = dataclasses.field(default_factory=collections.deque)

    def __post_init__(self) -> None:
        if self.read_loss_every < 1:
            raise ValueError(f"read_loss_every must be at least 1, got {self.read_loss_every}")

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks in a second of training."""
        return self.num_samples / self.seconds if self.seconds else 0.0

    def add_step(self, loss: Tensor, batch_size: int) -> bool:
        """Count a step with mean ``loss []`` over this rank's samples. Returns True where a point
        was added.

        Raises:
            FloatingPointError: if the loss of a point is not finite.
        """
        self.num_steps += 1
        weighted = loss.detach().float() * batch_size
        known = self._loss_sum
        self._loss_sum = weighted if known is None else known.to(weighted.device) + weighted
        self._unread_samples += batch_size
        self._unread_steps += 1
        if self.num_steps % self.read_loss_every == 0:
            self._begin_reading()
        num_points = len(self.losses)
        while self._readings:
            oldest = self._readings[0]
            is_due = self.num_steps - oldest.step >= _STEPS_OF_READING
            if oldest.arrived is not None and not is_due:
                break
            self._finish_reading()
        return len(self.losses) > num_points

    def read_begun(self) -> bool:
        """Wait for the sums that are being copied and add their points. Returns False for none.

        Every rank must call it.

        Raises:
            FloatingPointError: if a loss is not finite.
        """
        was_any = bool(self._readings)
        while self._readings:
            self._finish_reading()
        return was_any

    def read_loss(self) -> bool:
        """Wait for the device and add the points of all steps so far. Returns False for none.

        Every rank must call it.

        Raises:
            FloatingPointError: if a loss is not finite.
        """
        if self._unread_steps:
            self._begin_reading()
        return self.read_begun()

    def _begin_reading(self) -> None:
        unread = torch.zeros(()) if self._loss_sum is None else self._loss_sum
        arrived = None
        on_host = unread.to("cpu", non_blocking=True)
        if unread.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        self._readings.append(
            _Reading(self.num_steps, self._unread_steps, self._unread_samples, on_host, arrived)
        )
        self._loss_sum, self._unread_samples, self._unread_steps = None, 0, 0

    def _finish_reading(self) -> None:
        reading = self._readings.popleft()
        if reading.arrived is not None:
            reading.arrived.synchronize()
        local = torch.stack([reading.loss_sum.double(), torch.tensor(reading.num_samples)])
        total, num_samples = sum_over_ranks(local).tolist()
        loss = total / max(num_samples, 1.0)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss became {loss} within the {self.read_loss_every} steps before step "
                f"{reading.step}; lower the learning rate, or look for bad dense features"
            )
        self.num_samples += int(num_samples)
        self.losses.append(LossPoint(reading.step, loss))

    def state_dict(self) -> StateDict:
        """The history, and this rank's loss since the last reading; waits for the device."""
        unread = 0.0 if self._loss_sum is None else self._loss_sum.item()
        samples, steps = self._unread_samples, self._unread_steps
        for reading in self._readings:
            if reading.arrived is not None:
                reading.arrived.synchronize()
            unread += reading.loss_sum.item()
            samples, steps = samples + reading.num_samples, steps + reading.num_steps
        return {
            "num_steps": self.num_steps,
            "num_samples": self.num_samples,
            "seconds": self.seconds,
            "losses": [list(point) for point in self.losses],
            "held_out": [[point.step, *_as_numbers(point.evaluation)] for point in self.held_out],
            "num_ranks": world_size(),
            "unread": [unread, samples],
            "unread_steps": steps,
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a :meth:`state_dict`.

        On another number of ranks all take rank 0's state, and rank 0 alone its unread loss: the
        next point leaves out the other ranks' samples of those steps.
        """
        self.num_steps, self.num_samples = state_dict["num_steps"], state_dict["num_samples"]
        self.seconds = state_dict["seconds"]
        self.losses = [LossPoint(*point) for point in state_dict["losses"]]
        self.held_out = [
            HeldOutPoint(step, _from_numbers(numbers)) for step, *numbers in state_dict["held_out"]
        ]
        self._readings.clear()
        self._loss_sum, self._unread_samples = None, 0
        self._unread_steps = state_dict["unread_steps"]
        if rank() == 0 or state_dict["num_ranks"] == world_size():
            unread, self._unread_samples = state_dict["unread"]
            self._loss_sum = torch.tensor(unread)

    def add_evaluation(self, evaluation: Evaluation | TaskEvaluations) -> None:
        """Add an evaluation after the current step."""
        self.held_out.append(HeldOutPoint(self.num_steps, evaluation))


def _as_numbers(evaluation: Evaluation | TaskEvaluations) -> list[Any]:
    """The numbers of an evaluation; of several tasks, in one mapping, those of each by name."""
    if isinstance(evaluation, Evaluation):
        return list(evaluation)
    return [{task: found._asdict() for task, found in evaluation.items()}]


def _from_numbers(numbers: list[Any]) -> Evaluation | TaskEvaluations:
    """The evaluation of :func:`_as_numbers`."""
    if len(numbers) > 1:
        return Evaluation(*numbers)
    return TaskEvaluations(
        (task, Evaluation(**found) if "auc" in found else RegressionEvaluation(**found))
        for task, found in numbers[0].items()
    )
