"""The ``nn.Module``s that people import."""

from typing import TYPE_CHECKING

from torchembed.core.later_imports import later_imports
from torchembed.modules.configs import EmbeddingBagConfig, EmbeddingConfig
from torchembed.modules.convert import convert
from torchembed.modules.dense.cross import Cross, LowRankCross
from torchembed.modules.dense.float8_linear import Float8Linear, use_float8_products
from torchembed.modules.dense.interaction import DotInteraction
from torchembed.modules.dense.mlp import MLP
from torchembed.modules.embedding import Embedding, EmbeddingBag
from torchembed.modules.embedding_bag_collection import EmbeddingBagCollection
from torchembed.modules.embedding_collection import EmbeddingCollection
from torchembed.modules.model_parameters import ModelParameters, split_parameters

if TYPE_CHECKING:
    from torchembed.modules.sharded.model_plan import plan_embeddings, table_uses
    from torchembed.modules.sharded.shard import shard_embeddings

_PLANS = "torchembed.modules.sharded.model_plan"
# Sharding is a quarter of all modules, and of no use to a process alone.
__getattr__ = later_imports(
    __name__,
    {
        "plan_embeddings": _PLANS,
        "table_uses": _PLANS,
        "shard_embeddings": "torchembed.modules.sharded.shard",
    },
)

__all__ = [
    "MLP",
    "Cross",
    "DotInteraction",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "Float8Linear",
    "LowRankCross",
    "ModelParameters",
    "convert",
    "plan_embeddings",
    "shard_embeddings",
    "split_parameters",
    "table_uses",
    "use_float8_products",
]
