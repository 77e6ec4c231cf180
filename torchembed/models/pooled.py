"""Widths of a collection's pooled vectors, which models size their layers by."""

from collections.abc import Callable, Sequence

from torch import nn

from torchembed.modules.configs import EmbeddingBagConfig


def pooled_dims(embedding_bag_collection: nn.Module) -> list[int]:
    """The width of each feature's pooled vector, in the order of the collection's result.

    Raises:
        TypeError: where it is no embedding bag collection.
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
