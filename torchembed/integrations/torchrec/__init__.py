"""TorchRec's models over our tables: ``DistributedModelParallel(model, get_default_sharders())``.

Plans, planners, pipelines, metrics, optimizers and checkpoints stay TorchRec's.
"""

# First, so that a version that does not fit is named before anything of it fails.
from torchembed.integrations.torchrec.versions import check_version  # isort: skip
from torchembed.integrations.torchrec.install import install, uninstall
from torchembed.integrations.torchrec.pipeline import TrainPipeline
from torchembed.integrations.torchrec.sharders import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    get_default_sharders,
)

__all__ = [
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "TrainPipeline",
    "check_version",
    "get_default_sharders",
    "install",
    "uninstall",
]
