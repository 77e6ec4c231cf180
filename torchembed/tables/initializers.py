"""Initial rows as functions of (seed, table, row, column): the same however a table is sharded."""

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from torchembed.core.random_bits import GOLDEN, random_bits, random_uniform, signed64

_CHUNK_ELEMENTS = 1 << 22  # bounds the int64 scratch of one step to some hundred megabytes


def shifted_row_key(table_key: int, rows: int) -> int:
    """The key under which row ``r`` draws what row ``r + rows`` draws under ``table_key``.

    It lets a kernel that sees a shard, or a table inside a group, number rows as it likes.
    """
    return signed64(table_key + rows * GOLDEN)


RowIds = range | Tensor
"""An id for each of ``n`` rows, int64 ``[n]`` where it is a tensor. What is drawn for a row is a
function of its table and its id, wherever it is: its number where ids are the numbers of rows."""


class Initializer(Protocol):
    """Fills rows of a table, columns from ``first_column`` on."""

    def fill(
        self, weight: Tensor, table_key: int, row_ids: RowIds, first_column: int, num_rows: int
    ) -> None:
        """Fill ``weight [n, columns]`` in place; the whole table has ``num_rows`` rows."""
        ...


def _fill_from_counters(
    weight: Tensor,
    table_key: int,
    row_ids: RowIds,
    first_column: int,
    draw: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Fill ``weight`` with ``draw(row_keys [n, 1], columns)``, a bounded part at a time."""
    num_rows, dim = weight.shape
    table_keys = torch.full((1,), table_key, dtype=torch.int64, device=weight.device)
    columns = torch.arange(first_column, first_column + dim, device=weight.device)
    rows_a_chunk = max(1, _CHUNK_ELEMENTS // max(dim, 1))
    for start in range(0, num_rows, rows_a_chunk):
        stop = min(start + rows_a_chunk, num_rows)
        ids = row_ids[start:stop]
        if isinstance(ids, range):
            ids = torch.arange(ids.start, ids.stop, device=weight.device)
        keys = random_bits(table_keys, ids).unsqueeze(1)
        weight[start:stop] = draw(keys, columns).to(weight.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform:
    """Uniform between ``low`` and ``high``; by default ``1 / sqrt(num_rows)`` either side of 0."""

    low: float | None = None
    high: float | None = None

    def bounds(self, num_rows: int) -> tuple[float, float]:
        """The least value of a table of ``num_rows`` rows, and the end of its values."""
        bound = 1.0 / math.sqrt(max(num_rows, 1))
        return -bound if self.low is None else self.low, bound if self.high is None else self.high

    def fill(
        self, weight: Tensor, table_key: int, row_ids: RowIds, first_column: int, num_rows: int
    ) -> None:
        """Fill ``weight [n, columns]``, columns from ``first_column`` on of ``row_ids``."""
        low, high = self.bounds(num_rows)
        _fill_from_counters(
            weight,
            table_key,
            row_ids,
            first_column,
            lambda keys, columns: low + (high - low) * random_uniform(keys, columns),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Normal:
    """Normal with ``mean`` and ``std`` (Box, Muller 1958)."""

    mean: float = 0.0
    std: float = 1.0

    def fill(
        self, weight: Tensor, table_key: int, row_ids: RowIds, first_column: int, num_rows: int
    ) -> None:
        """Fill ``weight [n, columns]``, columns from ``first_column`` on of ``row_ids``."""

        def draw(keys: Tensor, columns: Tensor) -> Tensor:
            radius = (-2.0 * torch.log1p(-random_uniform(keys, 2 * columns))).sqrt()
            angle = 2.0 * math.pi * random_uniform(keys, 2 * columns + 1)
            return self.mean + self.std * radius * torch.cos(angle)

        _fill_from_counters(weight, table_key, row_ids, first_column, draw)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """Every element ``value``."""

    value: float = 0.0

    def fill(
        self, weight: Tensor, table_key: int, row_ids: RowIds, first_column: int, num_rows: int
    ) -> None:
        """Fill ``weight [n, columns]``, columns from ``first_column`` on of ``row_ids``."""
        weight.fill_(self.value)


@dataclasses.dataclass(frozen=True)
class InPlaceFunction:
    """Initial values that ``function`` gives; whether they depend on the sharding is up to it.

    It gets the ``[n, columns]`` rows of one shard and either changes them or returns new ones.
    """

    function: Callable[[Tensor], Tensor | None]

    def fill(
        self, weight: Tensor, table_key: int, row_ids: RowIds, first_column: int, num_rows: int
    ) -> None:
        result = self.function(weight)
        if result is not None and result is not weight:
            weight.copy_(result)


def is_function_of_id(initializer: Initializer) -> bool:
    """True if the values of a row follow from its table and its id, so that a row may be made at
    any time."""
    return isinstance(initializer, Uniform | Normal | Constant)
