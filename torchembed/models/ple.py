"""``PLE``: levels of experts of each task's own beside shared ones."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchembed.models.experts import Experts, Gate
from torchembed.models.pooled import input_width
from torchembed.models.task_towers import TaskTowers, last_width


class CGC(nn.Module):
    """Customized gate control: experts of each task and shared ones. A task's gate mixes its own
    and the shared ones; the shared gate, where there is one, mixes all of them.

    H. Tang et al., "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model
    for Personalized Recommendations", RecSys 2020, section 4.1.

    Args:
        in_features: width of the inputs.
        num_tasks: number of tasks.
        num_task_experts: experts of each task's own.
        num_shared_experts: experts that all tasks share.
        layer_sizes: widths of an expert's layers.
        has_shared_gate: whether a next level needs a shared input.
        dropout: dropout rate of the experts' layers.
        device: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        *,
        num_tasks: int,
        num_task_experts: int,
        num_shared_experts: int,
        layer_sizes: Sequence[int],
        has_shared_gate: bool,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()

        def experts(number: int) -> Experts:
            return Experts(in_features, number, layer_sizes, dropout=dropout, device=device)

        def gate(number: int) -> Gate:
            return Gate(in_features, number, device=device)

        self.shared_experts = experts(num_shared_experts)
        self.task_experts = nn.ModuleList(experts(num_task_experts) for _ in range(num_tasks))
        self.task_gates = nn.ModuleList(
            gate(num_task_experts + num_shared_experts) for _ in range(num_tasks)
        )
        self.shared_gate = (
            gate(num_tasks * num_task_experts + num_shared_experts) if has_shared_gate else None
        )

    def forward(self, tasks: Sequence[Tensor], shared: Tensor) -> list[Tensor]:
        """Mix the experts' outputs.

        Args:
            tasks: the input ``[B, in_features]`` of each task.
            shared: that of the shared experts and gate.

        Returns:
            A vector ``[B, layer_sizes[-1]]`` of each task, then the shared one where there is a
            shared gate.
        """
        of_shared = self.shared_experts(shared)
        own = [experts(x) for experts, x in zip(self.task_experts, tasks, strict=True)]
        mixed = [
            gate(x, torch.cat([of_task, of_shared], dim=1))
            for gate, x, of_task in zip(self.task_gates, tasks, own, strict=True)
        ]
        if self.shared_gate is not None:
            mixed.append(self.shared_gate(shared, torch.cat([*own, of_shared], dim=1)))
        return mixed


class PLE(TaskTowers):
    """Progressive layered extraction: levels of experts, each with experts of each task's own
    beside shared ones (:class:`CGC`), and a tower for each task. With one level it is CGC.

    H. Tang et al., "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model
    for Personalized Recommendations", RecSys 2020.

    Args:
        embedding_bag_collection: looks up and pools the sparse features; torchembed's or
            TorchRec's.
        task_names: a name for each task, by which outputs are returned.
        num_levels: levels of experts, one or more.
        num_task_experts: experts of each task's own in each level, one or more.
        num_shared_experts: experts that all tasks share in each level, one or more.
        expert_layer_sizes: widths of an expert's layers.
        tower_layer_sizes: widths of a tower's hidden layers, before its output; may be empty.
        dropout: dropout rate of all hidden layers.
        dense_in_features: number of dense features, which come before the embeddings.
        dense_device: device of the parameters other than the tables'.

    Raises:
        ValueError: for no task, names that are not different, no level, or no expert or layer.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        *,
        task_names: Sequence[str],
        num_levels: int,
        num_task_experts: int,
        num_shared_experts: int,
        expert_layer_sizes: Sequence[int],
        tower_layer_sizes: Sequence[int],
        dropout: float = 0.0,
        dense_in_features: int = 0,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            task_names=task_names,
            in_features=last_width("expert_layer_sizes", expert_layer_sizes),
            tower_layer_sizes=tower_layer_sizes,
            dropout=dropout,
            dense_in_features=dense_in_features,
            dense_device=dense_device,
        )
        for name, number in (
            ("num_levels", num_levels),
            ("num_task_experts", num_task_experts),
            ("num_shared_experts", num_shared_experts),
        ):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        width = input_width(embedding_bag_collection, dense_in_features)
        widths = [width, *[expert_layer_sizes[-1]] * (num_levels - 1)]
        self.levels = nn.ModuleList(
            CGC(
                in_features,
                num_tasks=len(task_names),
                num_task_experts=num_task_experts,
                num_shared_experts=num_shared_experts,
                layer_sizes=expert_layer_sizes,
                has_shared_gate=level < num_levels - 1,
                dropout=dropout,
                device=dense_device,
            )
            for level, in_features in enumerate(widths)
        )

    def vectors(self, x: Tensor) -> list[Tensor]:
        num_tasks = len(self.task_names)
        mixed = [x] * (num_tasks + 1)
        for level in self.levels:
            mixed = level(mixed[:num_tasks], mixed[-1])
        return mixed
