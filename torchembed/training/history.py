"""What happened in training, step by step."""

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchembed.training.evaluate import Evaluation
from torchembed.training.ranks import gather_objects, rank, sum_over_ranks, world_size


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
    _unread_by_rank: list[tuple[float, int]] = dataclasses.field(default_factory=list)

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
        self._loss_sum, self._unread_samples, self._unread_by_rank = None, 0, []
        loss = total / max(num_samples, 1.0)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss became {loss} within the {self.read_loss_every} steps before step "
                f"{self.num_steps}; lower the learning rate, or look for bad dense features"
            )
        self.num_samples += int(num_samples)
        self.losses.append(LossPoint(self.num_steps, loss))

    def pause(self) -> None:
        """Instead of :meth:`read_loss`, where the run is to go on later as if it had not stopped:
        what has not been read becomes part of the state. Every rank must call it."""
        own = 0.0 if self._loss_sum is None else self._loss_sum.item()
        self._unread_by_rank = gather_objects((own, self._unread_samples))

    def state_dict(self) -> dict[str, Any]:
        """All that is known on every rank, as numbers and lists."""
        return {
            "num_steps": self.num_steps,
            "num_samples": self.num_samples,
            "seconds": self.seconds,
            "losses": [list(point) for point in self.losses],
            "held_out": [[point.step, *point.evaluation] for point in self.held_out],
            "unread_by_rank": [list(unread) for unread in self._unread_by_rank],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave, on any number of ranks."""
        self.num_steps, self.num_samples = state_dict["num_steps"], state_dict["num_samples"]
        self.seconds = state_dict["seconds"]
        self.losses = [LossPoint(*point) for point in state_dict["losses"]]
        self.held_out = [
            HeldOutPoint(step, Evaluation(*evaluation))
            for step, *evaluation in state_dict["held_out"]
        ]
        unread = state_dict["unread_by_rank"]
        if unread and len(unread) != world_size():
            others = [[0.0, 0]] * (world_size() - 1)
            unread = [[sum(column) for column in zip(*unread, strict=True)], *others]
        self._loss_sum, self._unread_samples, self._unread_by_rank = None, 0, []
        if sum(num_samples for _, num_samples in unread):
            own, self._unread_samples = unread[rank()]
            self._loss_sum = torch.tensor(own)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Note how the model does on held-out rows now."""
        self.held_out.append(HeldOutPoint(self.num_steps, evaluation))
