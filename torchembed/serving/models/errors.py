"""Errors of deploying models and of reading what was deployed."""


class DeployError(ValueError):
    """The model cannot be served as it stands; the message says what to change."""


class ModelFolderError(ValueError):
    """The folder of a version is not as it was written: damaged, cut off, or of a later format."""


class OutOfMemoryBudgetError(MemoryError):
    """A version needs more memory than there is; nothing of it has been loaded."""
