"""Huge embedding tables for PyTorch: sharded over GPUs, looked up, pooled and updated in place."""

from typing import TYPE_CHECKING

from torchembed import optim
from torchembed.core.features import SparseFeatures
from torchembed.core.later_imports import later_imports
from torchembed.core.lookup_results import JaggedTensor, KeyedTensor
from torchembed.core.mixed_features import MixedFeatures
from torchembed.core.pytrees import register_trees
from torchembed.core.types import OnBadId, Pooling
from torchembed.modules import (
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    convert,
    split_parameters,
)
from torchembed.tables import (
    LFU,
    LRU,
    CacheStatistics,
    CallerScores,
    Chance,
    Constant,
    CountMinSketch,
    DecayingLFU,
    Delta,
    DeltaMark,
    Disk,
    Dynamic,
    EpochLFU,
    HashedRows,
    HostMemory,
    InPlaceFunction,
    MinimumCount,
    Missing,
    Normal,
    Probability,
    SnapshotDueError,
    TableDelta,
    TableStatistics,
    Uniform,
    gather_delta,
)

if TYPE_CHECKING:
    from torchembed.modules import plan_embeddings, shard_embeddings

register_trees()
__getattr__ = later_imports(
    __name__,
    {
        "plan_embeddings": "torchembed.modules",
        "shard_embeddings": "torchembed.modules",
        "sharding": "torchembed.sharding",
    },
)

__version__ = "0.1.0"

__all__ = [
    "LFU",
    "LRU",
    "CacheStatistics",
    "CallerScores",
    "Chance",
    "Constant",
    "CountMinSketch",
    "DecayingLFU",
    "Delta",
    "DeltaMark",
    "Disk",
    "Dynamic",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "EpochLFU",
    "HashedRows",
    "HostMemory",
    "InPlaceFunction",
    "JaggedTensor",
    "KeyedTensor",
    "MinimumCount",
    "Missing",
    "MixedFeatures",
    "Normal",
    "OnBadId",
    "Pooling",
    "Probability",
    "SnapshotDueError",
    "SparseFeatures",
    "TableDelta",
    "TableStatistics",
    "Uniform",
    "convert",
    "gather_delta",
    "optim",
    "plan_embeddings",
    "shard_embeddings",
    "split_parameters",
]


def __dir__() -> list[str]:
    # Names that are imported later, too, for whoever completes them.
    return sorted({*globals(), *__all__})
