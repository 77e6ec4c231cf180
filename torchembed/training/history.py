"""What happened in training, step by step."""

import collections
import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchembed.core.ranks import rank, sum_over_ranks, world_size
from torchembed.training.evaluate import Evaluation


class LossPoint(NamedTuple):
    """The mean loss of the samples of all ranks since the point before."""

    step: int
    loss: float


class HeldOutPoint(NamedTuple):
    """How the model did on held-out rows after ``step`` steps."""

    step: int
    evaluation: Evaluation


class _Reading(NamedTuple):
    """A sum of losses on its way from the device."""

    step: int
    num_steps: int
    num_samples: int
    loss_sum: Tensor
    arrived: torch.cuda.Event | None


_STEPS_OF_READING = 3
"""After so many the device is done with a step: a pipeline's host is less ahead of it."""


@dataclasses.dataclass
class History:
    """The steps of a training run; equal on every rank.

    Losses stay on the device: they are summed there and read, over all ranks, once in
    ``read_loss_every`` steps. From a GPU they are copied without waiting, and their point comes
    three steps later.
    """

    read_loss_every: int = 50
    num_steps: int = 0
    num_samples: int = 0
    """Over all ranks, at the last reading of the loss."""
    seconds: float = 0.0
    """Of training alone, without evaluations."""
    losses: list[LossPoint] = dataclasses.field(default_factory=list)
    held_out: list[HeldOutPoint] = dataclasses.field(default_factory=list)
    _loss_sum: Tensor | None = None
    _unread_samples: int = 0
    """On this rank; the steps are those of all."""
    _unread_steps: int = 0
    _readings: collections.deque[_Reading] = dataclasses.field(default_factory=collections.deque)

    def __post_init__(self) -> None:
        if self.read_loss_every < 1:
            raise ValueError(f"read_loss_every must be at least 1, got {self.read_loss_every}")

    @property
    def samples_per_second(self) -> float:
        """Over all ranks."""
        return self.num_samples / self.seconds if self.seconds else 0.0

    def add_step(self, loss: Tensor, batch_size: int) -> bool:
        """Count one step of mean ``loss [] `` over this rank's samples; True where a point came.

        Raises:
            FloatingPointError: where the loss of a point is not finite.
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
        """Wait for the points that are on their way; False where there were none.

        Every rank must call it.

        Raises:
            FloatingPointError: where a loss is not finite.
        """
        was_any = bool(self._readings)
        while self._readings:
            self._finish_reading()
        return was_any

    def read_loss(self) -> bool:
        """Wait for the device and add the point of the steps since the last reading, after those
        on their way; False where there were none.

        Every rank must call it.

        Raises:
            FloatingPointError: where a loss is not finite.
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

    def state_dict(self) -> dict[str, Any]:
        """What every rank knows, and this one's loss since the last reading, as numbers; waits for
        the device."""
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
            "held_out": [[point.step, *point.evaluation] for point in self.held_out],
            "num_ranks": world_size(),
            "unread": [unread, samples],
            "unread_steps": steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave.

        On another number of ranks all take the first one's state, and it alone what was not read:
        the next point leaves the others' samples of those steps out.
        """
        self.num_steps, self.num_samples = state_dict["num_steps"], state_dict["num_samples"]
        self.seconds = state_dict["seconds"]
        self.losses = [LossPoint(*point) for point in state_dict["losses"]]
        self.held_out = [
            HeldOutPoint(step, Evaluation(*evaluation))
            for step, *evaluation in state_dict["held_out"]
        ]
        self._readings.clear()
        self._loss_sum, self._unread_samples = None, 0
        self._unread_steps = state_dict["unread_steps"]
        if rank() == 0 or state_dict["num_ranks"] == world_size():
            unread, self._unread_samples = state_dict["unread"]
            self._loss_sum = torch.tensor(unread)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Note how the model does on held-out rows now."""
        self.held_out.append(HeldOutPoint(self.num_steps, evaluation))
