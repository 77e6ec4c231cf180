"""Inputs and outputs of a model's dense part, and how features reach tables."""

import dataclasses
import enum

DEFAULT_ROWS = "default_rows"
"""The output of servers with the number of ids of each sample that had no row to hand."""


class Combining(enum.Enum):
    """Treatment of the vectors of a bag's ids."""

    SUM = "sum"
    MEAN = "mean"
    EACH = "each"
    """One vector for each id."""


class BadIds(enum.Enum):
    """Treatment of ids outside ``[0, num_ids)``."""

    RAISE = "raise"
    CLAMP = "clamp"
    ZERO = "zero"


class ArgumentKind(enum.Enum):
    """Source of an argument of the dense part."""

    INPUT = "input"
    """A dense input of the request."""
    IDS = "ids"
    """The ids of a feature, int64: ``[B]`` or ``[B, hotness]``, or ``[L]`` of a jagged one."""
    VECTORS = "vectors"
    """The result of a lookup: ``[B, D]``, ``[B, hotness, D]``, or ``[L, D]`` of jagged features."""
    LENGTHS = "lengths"
    """Lengths of the bags of a lookup of a jagged feature, int64 ``[B]``."""
    UNUSED = "unused"
    """An argument that the outputs do not depend on, as labels are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseInput:
    """An input of numbers, as requests have it."""

    name: str
    dtype: str
    """Name of the dtype in numpy."""
    shape: tuple[int, ...]
    """Shape of one sample."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature of ids, as requests have it."""

    name: str
    hotness: int | None
    """Ids of each sample; None for as many as there are."""
    is_weighted: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookup:
    """The use of a table by a feature."""

    feature: str
    table: str
    combining: Combining
    is_weighted: bool
    padding_id: int | None
    """An id that bags are looked up without; None where there is none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument of the dense part, behind the weights."""

    kind: ArgumentKind
    name: str
    """Name of the input or feature, or of the argument itself where it is unused."""
    lookup: int = -1
    """Position of the lookup."""
    shape: tuple[int, ...] = ()
    """Shape of an unused argument; -1 stands for the number of samples."""
    dtype: str = ""
    """Name of the dtype in torch of an unused argument, and of vectors where these are not
    float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """An output, float32, as answers have it."""

    name: str
    shape: tuple[int, ...]
    """Shape of one sample."""
