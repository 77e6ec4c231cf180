"""Learning rates that change from step to step."""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningRate:
    """A line up from zero, then the optimizer's own rate, then a polynomial down, by steps.

    Of step t, counted from 1, with the optimizer's rate ``lr``::

        t < warmup_steps             lr * t / warmup_steps
        t < decay_start_step         lr
        then, for decay_steps steps  lr * (1 - (t - decay_start_step) / decay_steps)**power
        and after them               0

    and never less than ``end_value`` once the decay has begun. The defaults are a constant rate.
    With ``power=2`` and ``end_value=1e-7`` it is that of MLPerf's DLRM
    (https://github.com/mlcommons/training/tree/master/recommendation_v2), but that MLPerf's keeps
    the rate of the step before between the two parts and after them.
    """

    warmup_steps: int = 0
    decay_start_step: int = 0
    """The first step of the decay; without decay it has no meaning."""
    decay_steps: int = 0
    """0 for no decay."""
    end_value: float = 0.0
    """The least rate of the decay, and that of all steps after it."""
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
        """The rate of step ``step``, counted from 1, where the optimizer's own is ``lr``."""
        if step < self.warmup_steps:
            return lr * step / self.warmup_steps
        if not self.decay_steps or step < self.decay_start_step:
            return lr
        left = max(1 - (step - self.decay_start_step) / self.decay_steps, 0.0)
        return max(lr * left**self.power, self.end_value)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """Sets the rate of ``optimizer``, fused or torch's own: now that of the first step, and
        that of the next at each ``step()``. Its state dict says how far it has got."""
        return _Scheduler(optimizer, self)


class _Scheduler(LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, rate: LearningRate) -> None:
        self._rate = rate
        self._own: list[float] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        # Once, since of a rate that is a tensor the host waits for the device.
        self._own = self._own or [float(lr) for lr in self.base_lrs]
        return [self._rate.at(self.last_epoch + 1, lr) for lr in self._own]

    def state_dict(self) -> dict[str, Any]:
        """All but the schedule, so that a run can go on with another."""
        state = super().state_dict()
        return {key: value for key, value in state.items() if key not in ("_rate", "_own")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._own = []
