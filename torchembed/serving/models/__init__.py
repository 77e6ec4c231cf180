"""Deployed models: written as folders, loaded, swapped and asked."""

from torchembed.serving.models.deploy import deploy
from torchembed.serving.models.description import ModelDescription
from torchembed.serving.models.errors import (
    DeployError,
    ModelFolderError,
    OutOfMemoryBudgetError,
    QueueFullError,
)
from torchembed.serving.models.model_folder import (
    models_in,
    read_description,
    version_folder,
    versions_in,
)

__all__ = [
    "DeployError",
    "ModelDescription",
    "ModelFolderError",
    "OutOfMemoryBudgetError",
    "QueueFullError",
    "deploy",
    "models_in",
    "read_description",
    "version_folder",
    "versions_in",
]
