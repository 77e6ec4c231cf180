"""``DCN``: a cross network of vectors and an MLP over embeddings."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchembed.core.features import Features
from torchembed.models.pooled import beside_dense, input_width
from torchembed.modules.dense.cross import VectorCross
from torchembed.modules.dense.mlp import MLP


class DCN(nn.Module):
    """A cross network of vectors, and parallel to it an MLP, over embeddings, and dense features
    where there are any.

    R. Wang et al., "Deep & Cross Network for Ad Click Predictions", ADKDD 2017.
    :class:`~torchembed.models.DCNv2` has matrices in place of the vectors.

    Args:
        embedding_bag_collection: looks up and pools the sparse features; torchembed's or
            TorchRec's.
        num_cross_layers: layers of the cross network.
        layer_sizes: widths of the MLP's layers.
        dropout: dropout rate of the MLP's layers.
        batch_norm: whether the MLP's layers are normalized over the batch.
        dense_in_features: number of dense features, which come before the embeddings.
        dense_device: device of the parameters other than the tables'.

    Raises:
        TypeError: if ``embedding_bag_collection`` is none.
        ValueError: for no layers of the MLP.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        *,
        num_cross_layers: int,
        layer_sizes: Sequence[int],
        dropout: float = 0.0,
        batch_norm: bool = False,
        dense_in_features: int = 0,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        width = input_width(embedding_bag_collection, dense_in_features)
        self.cross = VectorCross(width, num_cross_layers, device=dense_device)
        self.mlp = MLP(
            width, layer_sizes, dropout=dropout, batch_norm=batch_norm, device=dense_device
        )
        self.logit = nn.Linear(width + layer_sizes[-1], 1, device=dense_device)
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
        return self.logit(torch.cat([self.cross(features), self.mlp(features)], dim=1))
