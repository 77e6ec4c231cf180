"""Learning-rate schedule: linear warm-up, constant rate, polynomial decay."""

import dataclasses

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import StateDict


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up from zero, then the optimizer's own rate, then polynomial decay, by steps.

    The rate of step t, counted from 1, where the optimizer's is ``lr``::

        t < warmup_steps             lr * t / warmup_steps
        t < decay_start_step         lr
        then, for decay_steps steps  lr * (1 - (t - decay_start_step) / decay_steps)**power
        and after them               0

    and never less than ``end_value`` once the decay has begun. The defaults are a constant rate.
    With ``power=2`` and ``end_value=1e-7`` it is the schedule of MLPerf's DLRM
    (https://github.com/mlcommons/training/tree/master/recommendation_v2), except that
    MLPerf's keeps the previous step's rate between the two parts and after them.
    """

    warmup_steps: int = 0
    decay_start_step: int = 0
    """First step of the decay; ignored without decay."""
    decay_steps: int = 0
    """Steps of the decay; 0 for none."""
    end_value: float = 0.0
    """Least rate of the decay, and the rate after it."""
    power: float = 2.0

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "decay_start_step", "decay_steps", "end_value", "power"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.decay_steps and self.decay_start_step < self.warmup_steps:
            raise ValueError(
                f"decay_start_step must be at least warmup_steps = {self.warmup_steps}, got "
                f"{self.decay_start_step}"
            )

    def at(self, step: int, lr: float) -> float:
        """The rate of ``step``, counted from 1, for an optimizer whose own rate is ``lr``."""
        if step < self.warmup_steps:
            return lr * step / self.warmup_steps
        if not self.decay_steps or step < self.decay_start_step:
            return lr
        left = 1 - (step - self.decay_start_step) / self.decay_steps
        return max(lr * left**self.power if left > 0 else 0.0, self.end_value)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """Make a scheduler that sets the rate of ``optimizer``, torchembed's or torch's: to the
        first step's now, to the next step's in each ``step()``. Its state dict holds the
        position."""
        return _Scheduler(optimizer, self)


class _Scheduler(LRScheduler):
    """Sets an optimizer's rate to that of a :class:`LearningRate`."""

    def __init__(self, optimizer: torch.optim.Optimizer, rate: LearningRate) -> None:
        self._rate = rate
        self._own: list[float] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        # Read once: reading a rate that is a tensor makes the host wait for the device.
        self._own = self._own or [float(lr) for lr in self.base_lrs]
        return [self._rate.at(self.last_epoch + 1, lr) for lr in self._own]

    def state_dict(self) -> StateDict:
        """The position without the schedule, so that a run can continue with another one."""
        state = super().state_dict()
        return {key: value for key, value in state.items() if key not in ("_rate", "_own")}

    def load_state_dict(self, state_dict: StateDict) -> None:
        super().load_state_dict(state_dict)
        self._own = []
