"""Sharders of TorchRec models over torchembed's tables, and a pipeline to train them.

Plans, planners, metrics, optimizers and checkpoints stay TorchRec's.
"""

# First, so that an unsupported version is named before something in it fails.
from torchembed.integrations.torchrec.versions import check_version  # isort: skip
from torchembed.integrations.torchrec.configs import EmbeddingBagConfig, EmbeddingConfig
from torchembed.integrations.torchrec.held_tables import DynamicTable, dynamic_tables
from torchembed.integrations.torchrec.install import install, uninstall
from torchembed.integrations.torchrec.pipeline.train_pipeline import TrainPipeline
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
