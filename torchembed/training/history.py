"""What happened in training, step by step."""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.training.evaluate import Evaluation
from torchembed.training.ranks import sum_over_ranks


class LossPoint(NamedTuple):
    """The mean loss of the samples of all ranks since the point before."""

    step: int
    loss: float


class HeldOutPoint(NamedTuple):
    """How the model did on held-out rows after ``step`` steps."""

    step: int
    evaluation: Evaluation


@dataclasses.dataclass
class History:
    """The steps of a training run; equal on every rank.

    Losses stay on the device: they are summed there and read, over all ranks, once in
    ``read_loss_every`` steps.
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

    def __post_init__(self) -> None:
        if self.read_loss_every < 1:
            raise ValueError(f"read_loss_every must be at least 1, got {self.read_loss_every}")

    @property
    def samples_per_second(self) -> float:
        """Over all ranks."""
        return self.num_samples / self.seconds if self.seconds else 0.0

    def add_step(self, loss: Tensor, batch_size: int) -> bool:
        """Count one step of mean ``loss [] `` over this rank's samples; True where it was read."""
        self.num_steps += 1
        weighted = loss.detach().float() * batch_size
        self._loss_sum = weighted if self._loss_sum is None else self._loss_sum + weighted
        self._unread_samples += batch_size
        if self.num_steps % self.read_loss_every:
            return False
        self.read_loss()
        return True

    def read_loss(self) -> None:
        """Wait for the device and add the point of the steps since the last reading, if any.

        Every rank must call it.

        Raises:
            FloatingPointError: where the loss is not finite.
        """
        if self._loss_sum is None:
            return
        local = torch.stack([self._loss_sum.cpu().double(), torch.tensor(self._unread_samples)])
        total, num_samples = sum_over_ranks(local).tolist()
        self._loss_sum, self._unread_samples = None, 0
        loss = total / max(num_samples, 1.0)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss became {loss} within the {self.read_loss_every} steps before step "
                f"{self.num_steps}; lower the learning rate, or look for bad dense features"
            )
        self.num_samples += int(num_samples)
        self.losses.append(LossPoint(self.num_steps, loss))

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Note how the model does on held-out rows now."""
        self.held_out.append(HeldOutPoint(self.num_steps, evaluation))
