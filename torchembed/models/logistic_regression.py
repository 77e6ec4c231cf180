"""``LogisticRegression``: a weight for each id."""

import torch
from torch import Tensor, nn

from torchembed.core.features import Features
from torchembed.models.pooled import checked_dense, pooled_dims


class LogisticRegression(nn.Module):
    """A weight for each id and for each dense feature, added up: ``logit = sum w_i * x_i + bias``.

    M. Richardson et al., "Predicting Clicks: Estimating the Click-Through Rate for New Ads",
    WWW 2007. Other models have it as their linear part.

    Args:
        linear_collection: an embedding bag collection, torchembed's or TorchRec's, whose tables
            have one column: the weights of the ids.
        dense_in_features: number of dense features, whose weights begin at zero.
        dense_device: device of the parameters other than the tables'.

    Raises:
        TypeError: if ``linear_collection`` is no embedding bag collection.
        ValueError: for tables of more than one column.
    """

    def __init__(
        self,
        linear_collection: nn.Module,
        *,
        dense_in_features: int = 0,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dims = pooled_dims(linear_collection)
        if set(dims) != {1}:
            raise ValueError(
                "linear_collection must have tables of embedding_dim 1, a weight for each id, "
                f"got {sorted(set(dims))}"
            )
        self.linear_collection = linear_collection
        self.bias = nn.Parameter(torch.zeros(1, device=dense_device))
        if dense_in_features:
            self.weight = nn.Parameter(torch.zeros(dense_in_features, 1, device=dense_device))
        self._dense_in_features = dense_in_features

    def forward(self, dense_features: Tensor | None, sparse_features: Features) -> Tensor:
        """Compute the logits of a batch.

        Args:
            dense_features: ``[B, dense_in_features]``; ignored where the model has none.
            sparse_features: the collection's argument.

        Returns:
            ``[B, 1]``.

        Raises:
            ValueError: if the model has dense features and the batch has none.
        """
        weights = self.linear_collection(sparse_features).values()
        logit = weights.sum(dim=1, keepdim=True) + self.bias
        if not self._dense_in_features:
            return logit
        return logit + checked_dense(dense_features, self._dense_in_features) @ self.weight
