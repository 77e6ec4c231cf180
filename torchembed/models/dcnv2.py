"""``DCNv2``: a cross network and an MLP over embeddings."""

import enum
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchembed.core.features import Features
from torchembed.models.pooled import beside_dense, input_width
from torchembed.modules.dense.cross import Cross, LowRankCross
from torchembed.modules.dense.mlp import MLP


class DCNv2Structure(enum.Enum):
    """Arrangement of the MLP and the cross network."""

    PARALLEL = "parallel"
    """Both take the embeddings; the logit takes their concatenated outputs."""
    STACKED = "stacked"
    """The MLP takes the cross network's output, and the logit takes the MLP's."""


class DCNv2(nn.Module):
    """A cross network and an MLP over embeddings, and dense features where there are any.

    R. Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021.

    Args:
        embedding_bag_collection: looks up and pools the sparse features; torchembed's or
            TorchRec's.
        num_cross_layers: layers of the cross network.
        layer_sizes: widths of the MLP's layers.
        low_rank: rank of the cross layers; None for full rank.
        structure: arrangement of the MLP and the cross network.
        dropout: dropout rate of the MLP's layers.
        batch_norm: whether the MLP's layers are normalized over the batch.
        dense_in_features: number of dense features, which come before the embeddings.
        dense_device: device of the parameters other than the tables'.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        *,
        num_cross_layers: int,
        layer_sizes: Sequence[int],
        low_rank: int | None = None,
        structure: DCNv2Structure = DCNv2Structure.PARALLEL,
        dropout: float = 0.0,
        batch_norm: bool = False,
        dense_in_features: int = 0,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        width = input_width(embedding_bag_collection, dense_in_features)
        self.embedding_bag_collection = embedding_bag_collection
        if low_rank is None:
            self.cross: nn.Module = Cross(width, num_cross_layers, device=dense_device)
        else:
            self.cross = LowRankCross(width, num_cross_layers, low_rank, device=dense_device)
        self.mlp = MLP(
            width, layer_sizes, dropout=dropout, batch_norm=batch_norm, device=dense_device
        )
        last = layer_sizes[-1] + (width if structure is DCNv2Structure.PARALLEL else 0)
        self.logit = nn.Linear(last, 1, device=dense_device)
        self._structure = structure
        self._dense_in_features = dense_in_features

    def forward(self, dense_features: Tensor | None, sparse_features: Features) -> Tensor:
        """Compute the logits of a batch.

        Args:
            dense_features: ``[B, dense_in_features]``; ignored where the model has none.
            sparse_features: the embedding bag collection's argument.

        Returns:
            ``[B, 1]``.

        Raises:
            ValueError: if the model has dense features and the batch has none.
        """
        pooled = self.embedding_bag_collection(sparse_features).values()
        features = beside_dense(dense_features, pooled, self._dense_in_features)
        crossed = self.cross(features)
        if self._structure is DCNv2Structure.STACKED:
            return self.logit(self.mlp(crossed))
        return self.logit(torch.cat([crossed, self.mlp(features)], dim=1))
