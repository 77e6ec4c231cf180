"""``DLRM``, with dot products between features, and ``DLRM_DCNv2``, with a cross network."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchembed.core.features import Features
from torchembed.models.pooled import pooled_dims
from torchembed.modules.dense.cross import LowRankCross
from torchembed.modules.dense.interaction import DotInteraction
from torchembed.modules.dense.mlp import MLP
from torchembed.modules.embedding_bag_collection import EmbeddingBagCollection


class DLRM(nn.Module):
    """Facebook's recommendation model: dense features and embeddings interact by dot products.

    M. Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
    Systems", arXiv:1906.00091. Argument-compatible with TorchRec's, whose trained values give the
    same logits here.

    Args:
        embedding_bag_collection: looks up and pools the sparse features; torchembed's or
            TorchRec's. All its tables have one dim ``D``.
        dense_in_features: number of dense features.
        dense_arch_layer_sizes: widths of the layers over the dense features, the last of them D.
        over_arch_layer_sizes: widths of the layers over the interactions, the last of them 1 for
            one logit.
        dense_device: device of the parameters other than the tables'.

    Raises:
        ValueError: for tables of several dims, or a last dense layer that is not D wide.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dims = pooled_dims(embedding_bag_collection)
        self.dense_arch = MLP(dense_in_features, dense_arch_layer_sizes, device=dense_device)
        if len(set(dims)) != 1:
            raise ValueError(
                "embedding_bag_collection must have tables of one embedding_dim, "
                f"got {sorted(set(dims))}; DLRM_DCNv2 takes several"
            )
        if dense_arch_layer_sizes[-1] != dims[0]:
            raise ValueError(
                f"dense_arch_layer_sizes must end with the embedding_dim {dims[0]}, "
                f"got {list(dense_arch_layer_sizes)}"
            )
        num_pairs = len(dims) * (len(dims) + 1) // 2
        self.embedding_bag_collection = embedding_bag_collection
        self.interaction = DotInteraction()
        self.over_arch = MLP(
            dims[0] + num_pairs,
            over_arch_layer_sizes,
            activation_on_last=False,
            device=dense_device,
        )

    def forward(self, dense_features: Tensor, sparse_features: Features) -> Tensor:
        """Compute the logits of a batch.

        Args:
            dense_features: ``[B, dense_in_features]``.
            sparse_features: the embedding bag collection's argument.

        Returns:
            ``[B, over_arch_layer_sizes[-1]]``.
        """
        dense = self.dense_arch(dense_features)
        pooled = self.embedding_bag_collection(sparse_features).values()
        sparse = pooled.unflatten(1, (-1, dense.shape[1]))
        return self.over_arch(self.interaction(dense, sparse))


class DLRM_DCNv2(nn.Module):
    """DLRM with a low-rank cross network in place of the dot products: MLPerf's DLRM-DCNv2.

    R. Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021. Argument-compatible with
    TorchRec's ``DLRM_DCN``, whose trained values give the same logits here.

    Args:
        embedding_bag_collection: looks up and pools the sparse features; torchembed's or
            TorchRec's.
        dense_in_features: number of dense features.
        dense_arch_layer_sizes: widths of the layers over the dense features.
        over_arch_layer_sizes: widths of the layers over the cross network, the last of them 1 for
            one logit.
        dcn_num_layers: layers of the cross network.
        dcn_low_rank_dim: rank of each of them.
        dense_device: device of the parameters other than the tables'.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dims = pooled_dims(embedding_bag_collection)
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_arch = MLP(dense_in_features, dense_arch_layer_sizes, device=dense_device)
        width = dense_arch_layer_sizes[-1] + sum(dims)
        if isinstance(embedding_bag_collection, EmbeddingBagCollection):
            # So that dense part and pooled vectors are one tensor without a copy.
            embedding_bag_collection.reserved_columns = dense_arch_layer_sizes[-1]
        self.cross = LowRankCross(width, dcn_num_layers, dcn_low_rank_dim, device=dense_device)
        self.over_arch = MLP(
            width, over_arch_layer_sizes, activation_on_last=False, device=dense_device
        )

    def forward(self, dense_features: Tensor, sparse_features: Features) -> Tensor:
        """Compute the logits of a batch.

        Args:
            dense_features: ``[B, dense_in_features]``.
            sparse_features: the embedding bag collection's argument.

        Returns:
            ``[B, over_arch_layer_sizes[-1]]``.
        """
        dense = self.dense_arch(dense_features)
        pooled = self.embedding_bag_collection(sparse_features).values()
        return self.over_arch(self.cross(dense, pooled))
