"""What happened in training, step by step."""

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchembed.training.evaluate import Evaluation
from torchembed.training.ranks import rank, sum_over_ranks, world_size


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
    """On this rank; the steps are those of all."""
    _unread_steps: int = 0

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
        known = self._loss_sum
        self._loss_sum = weighted if known is None else known.to(weighted.device) + weighted
        self._unread_samples += batch_size
        self._unread_steps += 1
        if self.num_steps % self.read_loss_every:
            return False
        self.read_loss()
        return True

    def read_loss(self) -> bool:
        """Wait for the device and add the point of the steps since the last reading; False where
        there were none.

        Every rank must call it.

        Raises:
            FloatingPointError: where the loss is not finite.
        """
        if not self._unread_steps:
            return False
        unread = torch.zeros(()) if self._loss_sum is None else self._loss_sum
        local = torch.stack([unread.cpu().double(), torch.tensor(self._unread_samples)])
        total, num_samples = sum_over_ranks(local).tolist()
        self._loss_sum, self._unread_samples, self._unread_steps = None, 0, 0
        loss = total / max(num_samples, 1.0)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss became {loss} within the {self.read_loss_every} steps before step "
                f"{self.num_steps}; lower the learning rate, or look for bad dense features"
            )
        self.num_samples += int(num_samples)
        self.losses.append(LossPoint(self.num_steps, loss))
        return True

    def state_dict(self) -> dict[str, Any]:
        """What every rank knows, and this one's loss since the last reading, as numbers; waits for
        the device."""
        unread = 0.0 if self._loss_sum is None else self._loss_sum.item()
        return {
            "num_steps": self.num_steps,
            "num_samples": self.num_samples,
            "seconds": self.seconds,
            "losses": [list(point) for point in self.losses],
            "held_out": [[point.step, *point.evaluation] for point in self.held_out],
            "num_ranks": world_size(),
            "unread": [unread, self._unread_samples],
            "unread_steps": self._unread_steps,
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
        self._loss_sum, self._unread_samples = None, 0
        self._unread_steps = state_dict["unread_steps"]
        if rank() == 0 or state_dict["num_ranks"] == world_size():
            unread, self._unread_samples = state_dict["unread"]
            self._loss_sum = torch.tensor(unread)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Note how the model does on held-out rows now."""
        self.held_out.append(HeldOutPoint(self.num_steps, evaluation))
