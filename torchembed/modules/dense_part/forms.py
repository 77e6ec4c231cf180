"""What the dense part of a model takes and gives, and how features reach tables."""

import dataclasses
import enum

DEFAULT_ROWS = "default_rows"
"""The output of servers with the number of ids of each sample that had no row to hand."""


class Combining(enum.Enum):
    """What becomes of the vectors of a bag's ids."""

    SUM = "sum"
    MEAN = "mean"
    EACH = "each"
    """One vector for each id."""


class BadIds(enum.Enum):
    """What becomes of ids outside ``[0, num_ids)``."""

    RAISE = "raise"
    CLAMP = "clamp"
    ZERO = "zero"


class ArgumentKind(enum.Enum):
    """Where an argument of the dense part comes from."""

    INPUT = "input"
    """A dense input of the request."""
    IDS = "ids"
    """The ids of a feature of fixed hotness, int64 ``[B, hotness]``."""
    VECTORS = "vectors"
    """What a lookup gives: ``[B, D]``, ``[B, hotness, D]``, or ``[L, D]`` of jagged features."""
    LENGTHS = "lengths"
    """Lengths of the bags of a lookup of a jagged feature, int64 ``[B]``."""
    UNUSED = "unused"
    """An argument that the outputs do not depend on, as labels are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseInput:
    """An input of numbers, as requests have it."""

    name: str
    dtype: str
    """Of numpy."""
    shape: tuple[int, ...]
    """Of one sample."""


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
    """Of the input or feature; of the argument itself where it is unused."""
    lookup: int = -1
    """Position of the lookup."""
    shape: tuple[int, ...] = ()
    """Of an unused argument; -1 stands for the number of samples."""
    dtype: str = ""
    """Of an unused argument, of torch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """An output, float32, as answers have it."""

    name: str
    shape: tuple[int, ...]
    """Of one sample."""
