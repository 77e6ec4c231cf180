"""``FactorizationMachine``: a weight for each id, and a product for each pair of features."""

import torch
from torch import Tensor, nn

from torchembed.core.features import Features
from torchembed.models.logistic_regression import LogisticRegression
from torchembed.models.pooled import common_dim
from torchembed.modules.dense.interaction import sum_of_pair_products


class FactorizationMachine(nn.Module):
    """A linear part, and the dot products of the vectors of all pairs of features.

    S. Rendle, "Factorization Machines", ICDM 2010. Dense features are in the linear part only.

    Args:
        embedding_bag_collection: looks up and pools the sparse features; torchembed's or
            TorchRec's. All its tables have one dim ``D``.
        linear_collection: the same with tables of one column, the weights of the linear part.
        dense_in_features: number of dense features.
        dense_device: device of the parameters other than the tables'.

    Raises:
        TypeError: if one is no embedding bag collection.
        ValueError: for tables of several dims, or a ``linear_collection`` of more than one column.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        linear_collection: nn.Module,
        *,
        dense_in_features: int = 0,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._dim = common_dim(embedding_bag_collection)
        self.embedding_bag_collection = embedding_bag_collection
        self.linear = LogisticRegression(
            linear_collection, dense_in_features=dense_in_features, dense_device=dense_device
        )

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
        pairs = sum_of_pair_products(pooled.unflatten(1, (-1, self._dim)))
        return self.linear(dense_features, sparse_features) + pairs
