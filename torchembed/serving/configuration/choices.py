"""What configurations choose among."""

import enum


class VolatileKind(enum.Enum):
    """Where volatile rows are."""

    MEMORY = "memory"
    """In the server's own."""
    REDIS = "redis"


class RowsOf(enum.Enum):
    """Whose rows answers are made of."""

    SHARED = "shared"
    """All versions of a model have the same, which updates change."""
    VERSION = "version"
    """Each version has its own."""
