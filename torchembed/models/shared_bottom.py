"""``SharedBottom``: one network for all tasks, and a tower for each."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchembed.models.pooled import input_width
from torchembed.models.task_towers import TaskTowers, last_width
from torchembed.modules.dense.mlp import MLP


class SharedBottom(TaskTowers):
    """An MLP over embeddings, and dense features where there are any, that all tasks share, with a
    tower for each task: the baseline of models of several tasks. With one task, an MLP.

    R. Caruana, "Multitask Learning", Machine Learning 28, 1997.

    Args:
        embedding_bag_collection: looks up and pools the sparse features; torchembed's or
            TorchRec's.
        task_names: a name for each task, by which outputs are returned.
        bottom_layer_sizes: widths of the shared MLP's layers.
        tower_layer_sizes: widths of a tower's hidden layers, before its output; may be empty.
        dropout: dropout rate of all hidden layers.
        dense_in_features: number of dense features, which come before the embeddings.
        dense_device: device of the parameters other than the tables'.

    Raises:
        ValueError: for no task, names that are not different, or no shared layers.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        *,
        task_names: Sequence[str],
        bottom_layer_sizes: Sequence[int],
        tower_layer_sizes: Sequence[int],
        dropout: float = 0.0,
        dense_in_features: int = 0,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            task_names=task_names,
            in_features=last_width("bottom_layer_sizes", bottom_layer_sizes),
            tower_layer_sizes=tower_layer_sizes,
            dropout=dropout,
            dense_in_features=dense_in_features,
            dense_device=dense_device,
        )
        width = input_width(embedding_bag_collection, dense_in_features)
        self.bottom = MLP(width, bottom_layer_sizes, dropout=dropout, device=dense_device)

    def vectors(self, x: Tensor) -> list[Tensor]:
        return [self.bottom(x)] * len(self.task_names)
