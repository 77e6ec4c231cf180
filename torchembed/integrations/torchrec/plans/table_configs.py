"""The configs of the tables of TorchRec's collections."""

from collections.abc import Sequence

from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection


def table_configs(module: nn.Module) -> Sequence[BaseEmbeddingConfig]:
    """The configs of an unsharded collection; none of any other module."""
    if isinstance(module, EmbeddingBagCollection):
        return module.embedding_bag_configs()
    return module.embedding_configs() if isinstance(module, EmbeddingCollection) else ()
