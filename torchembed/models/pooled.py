"""Common parts of models over an embedding bag collection: widths of pooled vectors, and dense
features beside them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchembed.modules.configs import EmbeddingBagConfig


def pooled_dims(embedding_bag_collection: nn.Module) -> list[int]:
    """The width of each feature's pooled vector, in the order of the collection's result.

    Raises:
        TypeError: if it is no embedding bag collection.
    """
    configs: Callable[[], Sequence[EmbeddingBagConfig]] | None = getattr(
        embedding_bag_collection, "embedding_bag_configs", None
    )
    if configs is None:
        raise TypeError(
            "embedding_bag_collection must be torchembed's or TorchRec's EmbeddingBagCollection, "
            f"got {type(embedding_bag_collection).__name__}, which has no embedding_bag_configs()"
        )
    return [config.embedding_dim for config in configs() for _ in config.feature_names]


def common_dim(embedding_bag_collection: nn.Module) -> int:
    """The width ``D`` that all pooled vectors have.

    Raises:
        TypeError: if it is no embedding bag collection.
        ValueError: for tables of several widths.
    """
    dims = sorted(set(pooled_dims(embedding_bag_collection)))
    if len(dims) != 1:
        raise ValueError(
            f"embedding_bag_collection must have tables of one embedding_dim, got {dims}; "
            "DCNv2 and DLRM_DCNv2 take several"
        )
    return dims[0]


def input_width(embedding_bag_collection: nn.Module, dense_in_features: int) -> int:
    """Width of the dense features and all embeddings of a sample, side by side."""
    return dense_in_features + sum(pooled_dims(embedding_bag_collection))


def checked_dense(dense_features: Tensor | None, dense_in_features: int) -> Tensor:
    """``dense_features`` of a model that has ``dense_in_features`` of them.

    Raises:
        ValueError: if the batch has none.
    """
    if dense_features is None:
        raise ValueError(f"dense_features must be [B, {dense_in_features}], got None")
    return dense_features


def beside_dense(dense_features: Tensor | None, pooled: Tensor, dense_in_features: int) -> Tensor:
    """The dense features ``[B, dense_in_features]`` and ``pooled [B, N]`` side by side; ``pooled``
    alone for a model without dense features.

    Raises:
        ValueError: if the model has dense features and the batch has none.
    """
    if not dense_in_features:
        return pooled
    return torch.cat([checked_dense(dense_features, dense_in_features), pooled], dim=1)
