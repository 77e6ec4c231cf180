"""Errors of reading what was deployed."""


class ModelFolderError(ValueError):
    """The folder of a version is not as it was written: damaged, cut off, or of a later format."""


class OutOfMemoryBudgetError(MemoryError):
    """A version needs more memory than there is; nothing of it has been loaded."""
