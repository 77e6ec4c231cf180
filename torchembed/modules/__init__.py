"""The ``nn.Module``s that people import."""

from torchembed.modules.configs import EmbeddingBagConfig, EmbeddingConfig
from torchembed.modules.embedding import Embedding, EmbeddingBag
from torchembed.modules.embedding_bag_collection import EmbeddingBagCollection
from torchembed.modules.embedding_collection import EmbeddingCollection
from torchembed.modules.shard import shard_embeddings

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "shard_embeddings",
]
