"""``WideAndDeep``: a linear part beside an MLP over embeddings."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchembed.core.features import Features
from torchembed.models.logistic_regression import LogisticRegression
from torchembed.models.pooled import beside_dense, input_width
from torchembed.modules.dense.mlp import MLP


class WideAndDeep(nn.Module):
    """A linear part, the wide one, beside an MLP over embeddings, the deep one.

    H.-T. Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016. Each collection
    looks up the features that it has tables for, so that crossed features may be in the wide part
    alone. Dense features are in both parts.

    Args:
        embedding_bag_collection: looks up and pools the sparse features of the deep part;
            torchembed's or TorchRec's.
        linear_collection: the same with tables of one column, the weights of the wide part.
        layer_sizes: widths of the MLP's layers, before the logit.
        dropout: dropout rate of the MLP's layers.
        batch_norm: whether the MLP's layers are normalized over the batch.
        dense_in_features: number of dense features, which come before the embeddings.
        dense_device: device of the parameters other than the tables'.

    Raises:
        TypeError: if one is no embedding bag collection.
        ValueError: for a ``linear_collection`` of more than one column, or no layers.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        linear_collection: nn.Module,
        *,
        layer_sizes: Sequence[int],
        dropout: float = 0.0,
        batch_norm: bool = False,
        dense_in_features: int = 0,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.linear = LogisticRegression(
            linear_collection, dense_in_features=dense_in_features, dense_device=dense_device
        )
        width = input_width(embedding_bag_collection, dense_in_features)
        self.mlp = MLP(
            width, layer_sizes, dropout=dropout, batch_norm=batch_norm, device=dense_device
        )
        self.logit = nn.Linear(layer_sizes[-1], 1, bias=False, device=dense_device)
        self._dense_in_features = dense_in_features

    def forward(self, dense_features: Tensor | None, sparse_features: Features) -> Tensor:
        """Compute the logits of a batch.

        Args:
            dense_features: ``[B, dense_in_features]``; ignored where the model has none.
            sparse_features: the argument of both collections.

        Returns:
            ``[B, 1]``.

        Raises:
            ValueError: if the model has dense features and the batch has none.
        """
        pooled = self.embedding_bag_collection(sparse_features).values()
        hidden = self.mlp(beside_dense(dense_features, pooled, self._dense_in_features))
        return self.linear(dense_features, sparse_features) + self.logit(hidden)
