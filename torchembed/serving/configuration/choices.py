"""The closed sets that configurations choose among."""

import enum


class VolatileKind(enum.Enum):
    """The place of volatile rows."""

    MEMORY = "memory"
    """The memory of the server's process."""
    REDIS = "redis"


class RowsOf(enum.Enum):
    """The rows that the answers of a version are made of."""

    SHARED = "shared"
    """All versions of a model have the same, which updates change."""
    VERSION = "version"
    """Each version has its own."""
