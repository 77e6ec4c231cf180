"""Sharders of TorchRec models over torchembed's tables, and a pipeline to train them.

Plans, planners, metrics, optimizers and checkpoints stay TorchRec's. Once this is imported, its
planners count what torchembed's tables take; what they say of others stays as it was.
"""

# First, so that an unsupported version is named before something in it fails.
from torchembed.integrations.torchrec.versions import check_version  # isort: skip
from torchembed.integrations.torchrec.configs import EmbeddingBagConfig, EmbeddingConfig
from torchembed.integrations.torchrec.held_tables import DynamicTable, dynamic_tables
from torchembed.integrations.torchrec.install import install, uninstall
from torchembed.integrations.torchrec.pipeline.train_pipeline import TrainPipeline
from torchembed.integrations.torchrec.planner.own_tables import plan_own_tables
from torchembed.integrations.torchrec.planner.storage_planning import plan_stored_tables
from torchembed.integrations.torchrec.sharded.sharders import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    get_default_sharders,
)

__all__ = [
    "DynamicTable",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagConfig",
    "EmbeddingCollectionSharder",
    "EmbeddingConfig",
    "TrainPipeline",
    "check_version",
    "dynamic_tables",
    "get_default_sharders",
    "install",
    "uninstall",
]

plan_own_tables()
plan_stored_tables()
