"""``AutoInt``: self-attention between features, and an MLP beside it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchembed.core.features import Features
from torchembed.models.pooled import beside_dense, common_dim, input_width, pooled_dims
from torchembed.modules.dense.feature_attention import FeatureAttention
from torchembed.modules.dense.mlp import MLP


class AutoInt(nn.Module):
    """Layers of self-attention between the vectors of features, and an MLP over the same ones.

    W. Song et al., "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural
    Networks", CIKM 2019; with the MLP it is the paper's AutoInt+. Dense features are in the MLP
    only.

    Args:
        embedding_bag_collection: looks up and pools the sparse features; torchembed's or
            TorchRec's. All its tables have one dim ``D``.
        num_attention_layers: layers of self-attention, one or more.
        attention_dim: width of a feature's vector after each of them, of all heads together.
        num_heads: heads of each.
        layer_sizes: widths of the MLP's layers, before the logit.
        dropout: dropout rate of the MLP's layers.
        batch_norm: whether the MLP's layers are normalized over the batch.
        dense_in_features: number of dense features, which come before the embeddings.
        dense_device: device of the parameters other than the tables'.

    Raises:
        TypeError: if ``embedding_bag_collection`` is none.
        ValueError: for tables of several dims, an ``attention_dim`` that is no multiple of
            ``num_heads``, or no layers.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        *,
        num_attention_layers: int,
        attention_dim: int,
        num_heads: int,
        layer_sizes: Sequence[int],
        dropout: float = 0.0,
        batch_norm: bool = False,
        dense_in_features: int = 0,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if num_attention_layers < 1:
            raise ValueError(f"num_attention_layers must be at least 1, got {num_attention_layers}")
        self._dim = common_dim(embedding_bag_collection)
        self.embedding_bag_collection = embedding_bag_collection
        self.attention = nn.Sequential(
            *(
                FeatureAttention(
                    attention_dim if layer else self._dim,
                    attention_dim,
                    num_heads,
                    device=dense_device,
                )
                for layer in range(num_attention_layers)
            )
        )
        width = input_width(embedding_bag_collection, dense_in_features)
        self.mlp = MLP(
            width, layer_sizes, dropout=dropout, batch_norm=batch_norm, device=dense_device
        )
        last = len(pooled_dims(embedding_bag_collection)) * attention_dim + layer_sizes[-1]
        self.logit = nn.Linear(last, 1, device=dense_device)
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
        attended = self.attention(pooled.unflatten(1, (-1, self._dim))).flatten(1)
        hidden = self.mlp(beside_dense(dense_features, pooled, self._dense_in_features))
        return self.logit(torch.cat([attended, hidden], dim=1))
