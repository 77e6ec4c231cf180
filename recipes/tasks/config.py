"""Configuration of a run of a model of several tasks."""

import dataclasses
import enum

from recipes.ctr.config import EarlyStoppedConfig


class Architecture(enum.Enum):
    """Parts of models below their towers."""

    SHARED_BOTTOM = "shared bottom"
    """One MLP for all tasks; with one task, a model of its own."""
    MMOE = "MMoE"
    """Shared experts, which each task mixes by a gate of its own."""
    PLE = "PLE"
    """Levels of experts of each task's own beside shared ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasksConfig(EarlyStoppedConfig):
    """A run, wholly: one training for each seed, stopped early; the result is their mean."""

    architecture: Architecture
    tasks: tuple[str, ...] = ()
    """The tasks to train, by name; all of the data's where there is none."""
    stop_on: str | None = None
    """The task whose score, AUC or R², decides when to stop; without it the mean of all."""
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
    learning_rate: float = 0.002
