"""Configuration of a run of a model of several tasks."""

import dataclasses
import enum
from pathlib import Path

from recipes.precision import Precision
from torchembed.sharding import Placement


class Architecture(enum.Enum):
    """What a model has below its towers."""

    SHARED_BOTTOM = "shared bottom"
    """One MLP for all tasks; with one task, a model of its own."""
    MMOE = "MMoE"
    """Shared experts, which each task mixes by a gate of its own."""
    PLE = "PLE"
    """Levels of experts of each task's own beside shared ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """A run, wholly: one training for each seed, stopped early; the result is their mean."""

    data: str | Path | None = None
    """The folder of the data, as published, or its URL; without it TORCHEMBED_DATA, or
    ../shared/data beside the checkout."""
    output: Path | None = None
    """A folder for checkpoints and pictures; without it runs/<recipe>-<time>."""
    seeds: tuple[int, ...] = (1, 2, 3)
    architecture: Architecture
    tasks: tuple[str, ...] = ()
    """The tasks to train, by name; all of the data's where there is none."""
    stop_on: str | None = None
    """The task whose score, AUC or R², decides when to stop; without it the mean of all."""
    embedding_dim: int = 16
    embedding_std: float = 0.05
    """Standard deviation of the tables' normal initial values."""
    bottom_layer_sizes: tuple[int, ...] = (256, 128)
    """Widths of the layers of a shared bottom."""
    num_experts: int = 4
    """Experts of MMoE."""
    num_levels: int = 2
    """Levels of PLE."""
    num_task_experts: int = 2
    """Experts of each task's own in a level of PLE."""
    num_shared_experts: int = 2
    """Shared experts in a level of PLE."""
    expert_layer_sizes: tuple[int, ...] = (128, 64)
    """Widths of the layers of an expert, of MMoE and PLE."""
    tower_layer_sizes: tuple[int, ...] = (32,)
    """Widths of the hidden layers of a task's tower."""
    dropout: float = 0.2
    placement: Placement | None = None
    """Placement of every table over several ranks; without it the plan chooses."""
    precision: Precision = Precision.FP32
    """Precision of all but weights and losses, which are float32."""
    batch_size: int = 4096
    """Samples a step, over all ranks."""
    learning_rate: float = 0.002
    """Learning rate of Adam, for tables and dense layers."""
    lr_decay: float = 0.1
    """The learning rate is multiplied by this after an epoch that did not improve."""
    patience: int = 2
    """Stop after so many epochs in a row without a better score on the validation rows."""
    min_improvement: float = 1e-4
    """Least increase of the score that counts as better."""
    max_epochs: int = 100

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must be different and at least one, got {self.seeds}")
        for name in ("batch_size", "patience", "max_epochs", "embedding_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
