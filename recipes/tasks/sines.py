"""A made set of two regressions whose correlation is planted.

The labels are those of section 3.3 of J. Ma et al., "Modeling Task Relationships in Multi-task
Learning with Multi-gate Mixture-of-Experts", KDD 2018. For orthogonal unit vectors u and v and a
correlation p, task k is of a direction w_k::

    w_1 = u,  w_2 = p u + sqrt(1 - p^2) v
    y_k = w_k x + sum_i sin(a_i w_k x + b_i) + noise,  noise normal of variance 0.01

with ``a_i = i`` and phases ``b_i`` that are drawn. There x is what a model is given; here it is the
concatenation of normal vectors of ids, one of each feature, and a model is given the ids. All is
drawn anew for each seed, and is the same for every model. No model can expect a mean squared error
below 0.01.
"""

import dataclasses
import math
from pathlib import Path

import torch
from torch import Tensor

from recipes.ctr.rows import OneIdEach, Rows
from recipes.ctr.splits import Splits
from recipes.ranks import check_batch_size
from recipes.result import Stopped, TasksResult
from recipes.served_run import ServedRun
from recipes.tasks.config import Architecture, TasksConfig
from recipes.tasks.run import chosen_tasks, run_seeds, served_tasks
from torchembed.training import Task, TaskKind

TASKS = tuple(Task(name=name, kind=TaskKind.REGRESSION) for name in ("first", "second"))
_NOISE_STD = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinesConfig(TasksConfig):
    """A run on made rows; ``data`` is not read."""

    correlation: float = 0.5
    """Cosine of the angle between the tasks' directions."""
    num_train: int = 100_000
    num_held_out: int = 20_000
    """Rows to validate, and as many to test."""
    num_features: int = 10
    num_ids: int = 50
    """Ids of each feature."""
    vector_dim: int = 2
    """Numbers in the vector of each id."""
    num_sines: int = 4
    embedding_dim: int = 4
    embedding_std: float = 0.3
    bottom_layer_sizes: tuple[int, ...] = (107,)
    """With these a shared bottom has as many parameters as MMoE."""
    num_experts: int = 8
    num_levels: int = 1
    num_task_experts: int = 3
    num_shared_experts: int = 2
    expert_layer_sizes: tuple[int, ...] = (16,)
    tower_layer_sizes: tuple[int, ...] = (8,)
    dropout: float = 0.0
    batch_size: int = 512
    learning_rate: float = 0.005
    max_epochs: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -1 <= self.correlation <= 1:
            raise ValueError(f"correlation must be from -1 to 1, got {self.correlation}")


def shared_bottom(data: str | Path | None = None) -> SinesConfig:
    """A shared bottom on two made regressions of sines whose correlation is --correlation."""
    return SinesConfig(data=data, architecture=Architecture.SHARED_BOTTOM)


def mmoe(data: str | Path | None = None) -> SinesConfig:
    """MMoE on two made regressions of sines whose correlation is --correlation."""
    return SinesConfig(data=data, architecture=Architecture.MMOE)


def ple(data: str | Path | None = None) -> SinesConfig:
    """PLE of one level on two made regressions of sines whose correlation is --correlation."""
    return SinesConfig(data=data, architecture=Architecture.PLE)


def check(config: SinesConfig, num_ranks: int) -> None:
    """Look for the tasks; raises as :func:`~recipes.tasks.run.chosen_tasks`, and ``ValueError`` for
    a folder of data."""
    check_batch_size(config.batch_size, num_ranks)
    chosen_tasks(config, TASKS)
    if config.data is not None:
        raise ValueError(
            f"--data must be left out for made rows, got {config.data}; the recipes shared-bottom, "
            "mmoe and ple read data"
        )


def run(config: SinesConfig, device: torch.device, output: Path) -> TasksResult | Stopped:
    """Train on rows that are made for each seed."""
    tasks = chosen_tasks(config, TASKS)
    return run_seeds(config, tasks, lambda seed: make(config, tasks, seed), device, output)


def served(config: SinesConfig, output: Path) -> ServedRun:
    """The best seed's model, asked of test rows."""
    tasks = chosen_tasks(config, TASKS)
    return served_tasks(config, tasks, lambda seed: make(config, tasks, seed), output)


def make(config: SinesConfig, tasks: tuple[Task, ...], seed: int) -> Splits:
    """The rows of a seed, divided."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = config.num_train + 2 * config.num_held_out
    size = (config.num_features, config.num_ids, config.vector_dim)
    vectors = torch.randn(size, generator=generator)
    ids = torch.randint(config.num_ids, (config.num_features, num_rows), generator=generator)
    x = torch.cat([of_feature[which] for of_feature, which in zip(vectors, ids, strict=True)], 1)
    directions = directions_of(x.shape[1], config.correlation, generator)
    phases = 2 * math.pi * torch.rand(config.num_sines, generator=generator)
    exact = sums_of_sines(x @ directions.T, phases)
    noise = _NOISE_STD * torch.randn(exact.shape, generator=generator)
    labels = {task.name: of for task, of in zip(TASKS, (exact + noise).unbind(1), strict=True)}
    known = torch.arange(config.num_ids)
    rows = Rows(
        features={f"feature_{n}": OneIdEach(raw_ids=known, ids=of) for n, of in enumerate(ids)},
        labels={task.name: labels[task.name] for task in tasks},
    )
    sizes = (config.num_train, config.num_held_out, config.num_held_out)
    return Splits(rows, *torch.arange(num_rows).split(sizes))


def directions_of(width: int, correlation: float, generator: torch.Generator) -> Tensor:
    """Two random unit vectors ``[2, width]`` whose product is ``correlation``."""
    u, v = torch.linalg.qr(torch.randn(width, 2, generator=generator)).Q.T
    return torch.stack([u, correlation * u + math.sqrt(1 - correlation**2) * v])


def sums_of_sines(projections: Tensor, phases: Tensor) -> Tensor:
    """``z + sum_i sin(i z + phases_i)`` of each ``z`` in ``projections``, from i = 1."""
    frequencies = torch.arange(1, len(phases) + 1)
    return projections + (projections.unsqueeze(-1) * frequencies + phases).sin().sum(-1)
