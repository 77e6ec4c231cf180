"""Tables that are served, and features that look them up."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchembed.core.types import Pooling
from torchembed.serving.levels.row_format import RowFormat


@dataclass(frozen=True, kw_only=True)
class ServedTable:
    """A table of rows by 64-bit id.

    Raises:
        TypeError, ValueError: for a name, dim or default that does not fit.
    """

    name: str
    """The table's name in stores. Models that give the same name share the table."""
    dim: int
    """Elements of a row."""
    row_format: RowFormat = RowFormat.FP32
    default: float = 0.0
    """Each element of the row that ids without one are answered by."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a string that is not empty, got {self.name!r}")
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(f"dim of table {self.name!r} must be an int, got {self.dim!r}")
        if self.dim < 1:
            raise ValueError(f"dim of table {self.name!r} must be positive, got {self.dim}")
        if not isinstance(self.row_format, RowFormat):
            raise TypeError(
                f"row_format of table {self.name!r} must be a RowFormat, got {self.row_format!r}; "
                f"take one of {', '.join(map(str, RowFormat))}"
            )
        if not math.isfinite(self.default):
            raise ValueError(
                f"default of table {self.name!r} must be a finite number, got {self.default}"
            )

    @property
    def line_bytes(self) -> int:
        """The bytes of a row, in stores and caches alike."""
        return self.row_format.line_bytes(self.dim)


@dataclass(frozen=True, kw_only=True)
class ServedFeature:
    """A feature of a model, and the table in which its ids are looked up."""

    name: str
    table: str
    """Name of a :class:`ServedTable`."""
    pooling: Pooling | None = Pooling.SUM
    """None for a vector for each id."""


def distinct_tables(tables: Iterable[ServedTable]) -> tuple[ServedTable, ...]:
    """``tables`` without repetitions, in the order of their first.

    Raises:
        ValueError: where there is no table, or two of one name are different.
    """
    found: dict[str, ServedTable] = {}
    for table in tables:
        first = found.setdefault(table.name, table)
        if first != table:
            raise ValueError(
                f"tables of the name {table.name!r} must be equal, got {first} and {table}; give "
                "one of them another name, or both the same form"
            )
    if not found:
        raise ValueError("tables must hold at least one table, got none")
    return tuple(found.values())


def positions_of(names: Sequence[str], tables: Sequence[ServedTable]) -> list[int]:
    """The place of each of ``names`` among ``tables``.

    Raises:
        ValueError: for a name that none of them has.
    """
    places = {table.name: place for place, table in enumerate(tables)}
    unknown = sorted(set(names).difference(places))
    if unknown:
        raise ValueError(f"tables must be among {list(places)}, got {unknown}")
    return [places[name] for name in names]
