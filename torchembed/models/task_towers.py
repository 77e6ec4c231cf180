"""``TaskTowers``: the base of models of several tasks."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from torchembed.core.features import Features
from torchembed.models.pooled import beside_dense
from torchembed.modules.dense.mlp import MLP


def last_width(argument: str, layer_sizes: Sequence[int]) -> int:
    """The width of the last of the layers that ``argument`` gives.

    Raises:
        ValueError: for no layers.
    """
    if not layer_sizes:
        raise ValueError(f"{argument} must hold one width or more, got none")
    return layer_sizes[-1]


class TaskTowers(nn.Module):
    """Base of models of several tasks: a tower for each task over a vector that is made for it.

    The output is a mapping by the names of the tasks: a logit of a binary task, a prediction of
    another one. Subclasses make the vectors, in :meth:`vectors`.

    Args:
        embedding_bag_collection: looks up and pools the sparse features; torchembed's or
            TorchRec's.
        task_names: a name for each task, all different.
        in_features: width of the vectors.
        tower_layer_sizes: widths of a tower's hidden layers, before its output; may be empty.
        dropout: dropout rate of these layers.
        dense_in_features: number of dense features, which come before the embeddings.
        dense_device: device of the parameters other than the tables'.

    Raises:
        ValueError: for no task, or names that are not different.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        *,
        task_names: Sequence[str],
        in_features: int,
        tower_layer_sizes: Sequence[int],
        dropout: float,
        dense_in_features: int,
        dense_device: torch.device | str | None,
    ) -> None:
        super().__init__()
        if not task_names or len(set(task_names)) != len(task_names):
            raise ValueError(
                f"task_names must be different and at least one, got {list(task_names)}"
            )
        self.embedding_bag_collection = embedding_bag_collection
        # Not by name: a task may have a name, as "forward", that modules use themselves.
        self.towers = nn.ModuleList(
            MLP(
                in_features,
                [*tower_layer_sizes, 1],
                activation_on_last=False,
                dropout=dropout,
                device=dense_device,
            )
            for _ in task_names
        )
        self.task_names = tuple(task_names)
        self._dense_in_features = dense_in_features

    @torch.no_grad()
    def start_at(self, outputs: Mapping[str, float]) -> None:
        """Set the bias of each task's output in place, for a model that is to be trained.

        Where labels are far from 0, as stars are, start at their mean. A bias moves by a learning
        rate a step, so until then the hidden units must make up the rest, and dropout, which turns
        that into noise, hides what there is to learn.

        Args:
            outputs: a number for each task, by its name: for a regression the mean of its labels,
                for a binary task the logit of their mean, ``log(mean / (1 - mean))``.

        Raises:
            ValueError: if there is not one finite number for each task.
        """
        if outputs.keys() != set(self.task_names):
            raise ValueError(
                f"outputs must have a number for each of the tasks {list(self.task_names)} and no "
                f"others, got {list(outputs)}"
            )
        for name, tower in zip(self.task_names, self.towers, strict=True):
            if not math.isfinite(outputs[name]):
                raise ValueError(
                    f"outputs must be finite, got {outputs[name]} for {name}; a binary task whose "
                    "labels are all alike has no finite logit"
                )
            last = list(tower.children())[-1]
            assert isinstance(last, nn.Linear)
            last.bias.fill_(outputs[name])

    def vectors(self, x: Tensor) -> list[Tensor]:
        """The vector ``[B, in_features]`` of each task, of dense features and embeddings
        ``[B, N]``."""
        raise NotImplementedError

    def forward(
        self, dense_features: Tensor | None, sparse_features: Features
    ) -> dict[str, Tensor]:
        """Compute the outputs of a batch.

        Args:
            dense_features: ``[B, dense_in_features]``; ignored where the model has none.
            sparse_features: the embedding bag collection's argument.

        Returns:
            A tensor ``[B]`` for each task, by its name.

        Raises:
            ValueError: if the model has dense features and the batch has none.
        """
        pooled = self.embedding_bag_collection(sparse_features).values()
        x = beside_dense(dense_features, pooled, self._dense_in_features)
        outputs = [
            tower(vector).squeeze(1)
            for tower, vector in zip(self.towers, self.vectors(x), strict=True)
        ]
        return dict(zip(self.task_names, outputs, strict=True))
