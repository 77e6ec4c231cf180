"""Early stopping: at a target score, or when the score no longer improves."""

import dataclasses
import math

from torch.optim.optimizer import StateDict


@dataclasses.dataclass
class EarlyStop:
    """Tracks the best score and decides when to stop; ranks that pass equal scores decide alike.

    The score is the AUC, whence the names of arguments and attributes, or any other number that is
    greater for better models, such as the score of one of several tasks, or their mean, by
    :meth:`TaskEvaluations.score <torchembed.training.TaskEvaluations>`.

    Args:
        target_auc: stop at this score or a better one.
        patience: stop after this number of evaluations in a row without an improvement.
        min_improvement: least increase of the score that counts as an improvement.
        score_name: the name of the score, for :attr:`reason`.
    """

    target_auc: float | None = None
    patience: int | None = None
    min_improvement: float = 0.0
    score_name: str = "AUC"
    best_auc: float | None = dataclasses.field(default=None, init=False)
    """The best score so far; None before there is one."""
    best_step: int = dataclasses.field(default=0, init=False)
    """Step of the best score."""
    num_worse: int = dataclasses.field(default=0, init=False)
    """Evaluations since the best one."""

    def __post_init__(self) -> None:
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience must be at least 1 or None, got {self.patience}")
        # A comparison with NaN is never true: there would be no best score, and no end.
        if not self.min_improvement >= 0:
            raise ValueError(f"min_improvement must not be negative, got {self.min_improvement}")
        if self.target_auc is not None and math.isnan(self.target_auc):
            raise ValueError("target_auc must be a number or None, got nan")

    def update(self, step: int, auc: float) -> bool:
        """Record an evaluation, by its score. Returns True where it is the best so far; NaN never
        is."""
        best = -math.inf if self.best_auc is None else self.best_auc
        if auc > best and auc >= best + self.min_improvement:
            self.best_auc, self.best_step, self.num_worse = auc, step, 0
            return True
        self.num_worse += 1
        return False

    @property
    def has_reached_target(self) -> bool:
        """True where the best score is the target or better."""
        best, target = self.best_auc, self.target_auc
        return best is not None and target is not None and best >= target

    @property
    def reason(self) -> str | None:
        """The reason to stop now; None to continue."""
        if self.has_reached_target:
            return f"{self.score_name} {self.best_auc:.5f} reached {self.target_auc}"
        if self.patience is not None and self.num_worse >= self.patience:
            return (
                f"{self.score_name} no better than at step {self.best_step} in {self.num_worse} "
                "evaluations"
            )
        return None

    def state_dict(self) -> StateDict:
        """The best score and its step, without the limits."""
        names = ("best_auc", "best_step", "num_worse")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a :meth:`state_dict`."""
        self.best_auc = state_dict["best_auc"]
        self.best_step, self.num_worse = state_dict["best_step"], state_dict["num_worse"]
