"""Models of several tasks: some whose loss is their own, and the library's."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed.models
from tests.zoo.batches import labels_by_name, two_tasks
from tests.zoo.entries import Case, Family, adagrad
from tests.zoo.pooled_models import Pooled, layers, tables
from tests.zoo.sizes import Sizes
from torchembed.training import MultiTaskLoss, Task, TaskKind

TASKS = Family("tasks")
TwoTasks = dict[str, Any]


class OfTwoTasks(Pooled):
    """Base of the models: the mean of two tasks' losses."""

    def logits(self, x: Tensor) -> Tensor:
        """``[B, 2]`` of the features ``x [B, F * D]``."""
        raise NotImplementedError

    def forward(self, batch: TwoTasks) -> tuple[Tensor, Tensor]:
        logits = self.logits(self.vectors(batch["sparse"]).flatten(1))
        return F.binary_cross_entropy_with_logits(logits, batch["labels"]), logits.sigmoid()


@TASKS.model("shared bottom", two_tasks, computes_loss=True)
class SharedBottom(OfTwoTasks):
    """One bottom, a tower for each task."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.bottom = layers(self.width, sizes.hidden, sizes.hidden)
        self.towers = nn.ModuleList(layers(sizes.hidden, 8, 1) for _ in range(2))

    def logits(self, x: Tensor) -> Tensor:
        shared = self.bottom(x)
        return torch.cat([tower(shared) for tower in self.towers], dim=1)


@TASKS.model("MMoE", two_tasks, computes_loss=True)
class MMoE(OfTwoTasks):
    """Experts that each task mixes by a gate of its own."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.experts = nn.ModuleList(layers(self.width, sizes.hidden, 8) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(self.width, 3) for _ in range(2))
        self.towers = nn.ModuleList(layers(8, 8, 1) for _ in range(2))

    def logits(self, x: Tensor) -> Tensor:
        experts = torch.stack([expert(x) for expert in self.experts], dim=1)
        mixed = [(gate(x).softmax(1).unsqueeze(2) * experts).sum(1) for gate in self.gates]
        return torch.cat([t(m) for t, m in zip(self.towers, mixed, strict=True)], dim=1)


@TASKS.model("PLE", two_tasks, computes_loss=True)
class PLE(OfTwoTasks):
    """Experts of each task beside shared ones."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.shared = layers(self.width, sizes.hidden, 8)
        self.own = nn.ModuleList(layers(self.width, sizes.hidden, 8) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(self.width, 2) for _ in range(2))
        self.towers = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))

    def logits(self, x: Tensor) -> Tensor:
        shared, found = self.shared(x), []
        for own, gate, tower in zip(self.own, self.gates, self.towers, strict=True):
            weights = gate(x).softmax(1).unsqueeze(2)
            found.append(tower((weights * torch.stack([own(x), shared], dim=1)).sum(1)))
        return torch.cat(found, dim=1)


@TASKS.model("ESMM", two_tasks, computes_loss=True)
class ESMM(OfTwoTasks):
    """The probability of buying as that of clicking times that of buying then."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.towers = nn.ModuleList(layers(self.width, sizes.hidden, 1) for _ in range(2))

    def forward(self, batch: TwoTasks) -> tuple[Tensor, Tensor]:
        x = self.vectors(batch["sparse"]).flatten(1)
        click, buy = (tower(x)[:, 0].sigmoid() for tower in self.towers)
        both = torch.stack([click, click * buy], dim=1)
        return F.binary_cross_entropy(both, batch["labels"]), both


@TASKS.model("uncertainty weights", two_tasks, computes_loss=True)
class UncertaintyWeights(SharedBottom):
    """Tasks weighted by learned variances."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, batch: TwoTasks) -> tuple[Tensor, Tensor]:
        logits = self.logits(self.vectors(batch["sparse"]).flatten(1))
        losses = F.binary_cross_entropy_with_logits(logits, batch["labels"], reduction="none").mean(
            0
        )
        return (losses * (-self.log_variance).exp() + self.log_variance).sum(), logits


BY_NAME = MultiTaskLoss(
    [
        Task(name="click", kind=TaskKind.BINARY),
        Task(name="rating", kind=TaskKind.REGRESSION, weight=0.5, mask="is_rated"),
    ]
)


def _by_name(model: nn.Module) -> Case:
    return Case(model=model, optimizers=[adagrad(model)], loss_fn=BY_NAME)


@TASKS.habit("the library's shared bottom", labels_by_name)
def shared_bottom(sizes: Sizes) -> Case:
    """Outputs and labels by name; the second task's labels are known for some samples."""
    return _by_name(
        torchembed.models.SharedBottom(
            tables(sizes),
            task_names=["click", "rating"],
            bottom_layer_sizes=[sizes.hidden],
            tower_layer_sizes=[8],
            dense_in_features=sizes.num_dense,
        )
    )


@TASKS.habit("the library's MMoE", labels_by_name)
def mmoe(sizes: Sizes) -> Case:
    """The same with experts that all tasks share."""
    return _by_name(
        torchembed.models.MMoE(
            tables(sizes),
            task_names=["click", "rating"],
            num_experts=3,
            expert_layer_sizes=[sizes.hidden, 8],
            tower_layer_sizes=[8],
            dense_in_features=sizes.num_dense,
        )
    )


@TASKS.habit("the library's PLE", labels_by_name)
def ple(sizes: Sizes) -> Case:
    """The same with two levels of experts, some of each task's own."""
    return _by_name(
        torchembed.models.PLE(
            tables(sizes),
            task_names=["click", "rating"],
            num_levels=2,
            num_task_experts=2,
            num_shared_experts=1,
            expert_layer_sizes=[sizes.hidden, 8],
            tower_layer_sizes=[8],
            dense_in_features=sizes.num_dense,
        )
    )
