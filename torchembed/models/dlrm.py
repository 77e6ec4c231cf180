"""``DLRM``, with dot products between features, and ``DLRM_DCNv2``, with a cross network."""

import enum
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchembed.core.features import Features
from torchembed.models.pooled import checked_dense, common_dim, pooled_dims
from torchembed.modules.dense.cross import LowRankCross
from torchembed.modules.dense.interaction import DotInteraction
from torchembed.modules.dense.mlp import MLP
from torchembed.modules.embedding_bag_collection import EmbeddingBagCollection


class DLRMInteraction(enum.Enum):
    """Interaction of the features in :class:`DLRM`."""

    DOT = "dot"
    """The dense vector, and the dot products of all pairs of vectors."""
    CONCATENATION = "concatenation"
    """All vectors, side by side."""


class DLRM(nn.Module):
    """Facebook's recommendation model: dense features and embeddings interact by dot products.

    M. Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
    Systems", arXiv:1906.00091. Argument-compatible with TorchRec's, whose trained values give the
    same logits here.

    Args:
        embedding_bag_collection: looks up and pools the sparse features; torchembed's or
            TorchRec's. All its tables have one dim ``D``.
        dense_in_features: number of dense features; 0 for a model of sparse features alone.
        dense_arch_layer_sizes: widths of the layers over the dense features, the last of them D;
            none where there are no dense features.
        over_arch_layer_sizes: widths of the layers over the interactions, the last of them 1 for
            one logit.
        dense_device: device of the parameters other than the tables'.
        interaction: of the features.
        dropout: dropout rate of the layers over the interactions, but the last.
        batch_norm: whether these layers are normalized over the batch.

    Raises:
        ValueError: for tables of several dims, a last dense layer that is not D wide, dense layers
            without dense features, or dot products of a single feature.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | str | None = None,
        *,
        interaction: DLRMInteraction = DLRMInteraction.DOT,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self._dim = common_dim(embedding_bag_collection)
        self.dense_arch: MLP | None = None
        if dense_in_features:
            self.dense_arch = MLP(dense_in_features, dense_arch_layer_sizes, device=dense_device)
            if dense_arch_layer_sizes[-1] != self._dim:
                raise ValueError(
                    f"dense_arch_layer_sizes must end with the embedding_dim {self._dim}, "
                    f"got {list(dense_arch_layer_sizes)}"
                )
        elif dense_arch_layer_sizes:
            raise ValueError(
                "dense_arch_layer_sizes must be none where dense_in_features is 0, "
                f"got {list(dense_arch_layer_sizes)}"
            )
        num_vectors = len(pooled_dims(embedding_bag_collection)) + (dense_in_features > 0)
        self.embedding_bag_collection = embedding_bag_collection
        self.interaction: DotInteraction | None = None
        width = num_vectors * self._dim
        if interaction is DLRMInteraction.DOT:
            self.interaction = DotInteraction()
            if num_vectors < 2:
                raise ValueError(
                    "interaction must be CONCATENATION where one sparse feature is all there is, "
                    "since it has no dot products with others, got DOT"
                )
            of_dense = self._dim if dense_in_features else 0
            width = of_dense + num_vectors * (num_vectors - 1) // 2
        self.over_arch = MLP(
            width,
            over_arch_layer_sizes,
            activation_on_last=False,
            dropout=dropout,
            batch_norm=batch_norm,
            device=dense_device,
        )
        self._dense_in_features = dense_in_features

    def forward(self, dense_features: Tensor | None, sparse_features: Features) -> Tensor:
        """Compute the logits of a batch.

        Args:
            dense_features: ``[B, dense_in_features]``; ignored where the model has none.
            sparse_features: the embedding bag collection's argument.

        Returns:
            ``[B, over_arch_layer_sizes[-1]]``.

        Raises:
            ValueError: if the model has dense features and the batch has none.
        """
        dense = None
        if self.dense_arch is not None:
            dense = self.dense_arch(checked_dense(dense_features, self._dense_in_features))
        pooled = self.embedding_bag_collection(sparse_features).values()
        if self.interaction is not None:
            interactions = self.interaction(dense, pooled.unflatten(1, (-1, self._dim)))
        else:
            interactions = pooled if dense is None else torch.cat([dense, pooled], dim=1)
        return self.over_arch(interactions)


class DLRM_DCNv2(nn.Module):
    """DLRM with a low-rank cross network in place of the dot products: MLPerf's DLRM-DCNv2.

    R. Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021. Argument-compatible with
    TorchRec's ``DLRM_DCN``, whose trained values give the same logits here.

    Args:
        embedding_bag_collection: looks up and pools the sparse features; torchembed's or
            TorchRec's.
        dense_in_features: number of dense features, one or more.
        dense_arch_layer_sizes: widths of the layers over the dense features.
        over_arch_layer_sizes: widths of the layers over the cross network, the last of them 1 for
            one logit.
        dcn_num_layers: layers of the cross network.
        dcn_low_rank_dim: rank of each of them.
        dense_device: device of the parameters other than the tables'.

    Raises:
        ValueError: for no dense features, or no layers.
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
        if dense_in_features < 1:
            raise ValueError(
                f"dense_in_features must be at least 1, got {dense_in_features}; DCNv2 and DLRM "
                "take none"
            )
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
        self._dense_in_features = dense_in_features

    def forward(self, dense_features: Tensor, sparse_features: Features) -> Tensor:
        """Compute the logits of a batch.

        Args:
            dense_features: ``[B, dense_in_features]``.
            sparse_features: the embedding bag collection's argument.

        Returns:
            ``[B, over_arch_layer_sizes[-1]]``.

        Raises:
            ValueError: if the batch has no dense features.
        """
        dense = self.dense_arch(checked_dense(dense_features, self._dense_in_features))
        pooled = self.embedding_bag_collection(sparse_features).values()
        return self.over_arch(self.cross(dense, pooled))
