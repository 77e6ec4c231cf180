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


class CacheKind(enum.Enum):
    """How a cache is kept."""

    DYNAMIC = "dynamic"
    """Takes in rows that were missed, and those that updates bring."""
    STATIC = "static"
    """Has all rows, which do not change."""
    UVM = "uvm"
    """Has the rows that are asked for most; others are read from host memory in place."""


class RowFormat(enum.Enum):
    """The numbers of cached rows."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
