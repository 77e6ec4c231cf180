"""Deployed models: written as folders, loaded, swapped and asked."""

from torchembed.modules.dense_part.errors import DeployError
from torchembed.serving.models.deploy import deploy
from torchembed.serving.models.description import ModelDescription
from torchembed.serving.models.dynamic_batcher import BatchOptions
from torchembed.serving.models.errors import (
    ModelFolderError,
    OutOfMemoryBudgetError,
)
from torchembed.serving.models.model_folder import (
    models_in,
    read_description,
    version_folder,
    versions_in,
)
from torchembed.serving.models.model_options import ModelOptions
from torchembed.serving.models.model_repository import ModelRepository
from torchembed.serving.models.shared_lookups import LookupFactory

__all__ = [
    "BatchOptions",
    "DeployError",
    "LookupFactory",
    "ModelDescription",
    "ModelFolderError",
    "ModelOptions",
    "ModelRepository",
    "OutOfMemoryBudgetError",
    "deploy",
    "models_in",
    "read_description",
    "version_folder",
    "versions_in",
]
