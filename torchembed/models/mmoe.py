"""``MMoE``: experts that each task mixes by a gate of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchembed.models.experts import Experts, Gate
from torchembed.models.pooled import input_width
from torchembed.models.task_towers import TaskTowers, last_width


class MMoE(TaskTowers):
    """Multi-gate mixture of experts: all tasks share experts, and each mixes their outputs by a
    gate of its own, for its tower.

    J. Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate
    Mixture-of-Experts", KDD 2018.

    Args:
        embedding_bag_collection: looks up and pools the sparse features; torchembed's or
            TorchRec's.
        task_names: a name for each task, by which outputs are returned.
        num_experts: number of experts, one or more.
        expert_layer_sizes: widths of an expert's layers.
        tower_layer_sizes: widths of a tower's hidden layers, before its output; may be empty.
        dropout: dropout rate of all hidden layers.
        dense_in_features: number of dense features, which come before the embeddings.
        dense_device: device of the parameters other than the tables'.

    Raises:
        ValueError: for no task, names that are not different, or no expert or layer.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        *,
        task_names: Sequence[str],
        num_experts: int,
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
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        width = input_width(embedding_bag_collection, dense_in_features)
        self.experts = Experts(
            width, num_experts, expert_layer_sizes, dropout=dropout, device=dense_device
        )
        self.gates = nn.ModuleList(
            Gate(width, num_experts, device=dense_device) for _ in task_names
        )

    def vectors(self, x: Tensor) -> list[Tensor]:
        experts = self.experts(x)
        return [gate(x, experts) for gate in self.gates]
