"""Initial values of a group's tables, as the operation that writes rows of new ids takes them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchembed.core.types import InitializerKind
from torchembed.ops.initialize_rows import InitialValues
from torchembed.tables.initializers import Constant, Initializer, Normal, Uniform


class InitializedTable(NamedTuple):
    """One table of a group, in the words of what its new rows get."""

    key: int
    """64-bit key of its initial rows."""
    initializer: Initializer
    num_rows: int
    """Rows of the whole table."""
    first_column: int = 0
    """Number, in the whole table, of the first column here."""


def _distribution(table: InitializedTable) -> tuple[InitializerKind, float, float]:
    initializer = table.initializer
    if isinstance(initializer, Uniform):
        low, high = initializer.bounds(table.num_rows)
        return InitializerKind.UNIFORM, low, high - low
    if isinstance(initializer, Normal):
        return InitializerKind.NORMAL, initializer.mean, initializer.std
    if isinstance(initializer, Constant):
        return InitializerKind.CONSTANT, initializer.value, 0.0
    raise TypeError(
        "the initializer of a table whose ids come and go must be Uniform, Normal or Constant, "
        f"whose values are functions of the id, got {type(initializer).__name__}"
    )


def initial_values(tables: Sequence[InitializedTable], device: torch.device) -> InitialValues:
    """The initial values of ``tables``, on ``device``.

    Raises:
        TypeError: for an initializer whose values are no function of (table key, id, column).
    """
    distributions = [_distribution(table) for table in tables]

    def numbers(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    parameters = [(first, second) for _, first, second in distributions]
    return InitialValues(
        table_keys=numbers([table.key for table in tables], torch.int64),
        kinds=numbers([kind for kind, _, _ in distributions], torch.int32),
        parameters=torch.tensor(parameters, dtype=torch.float32, device=device).reshape(-1, 2),
        first_columns=numbers([table.first_column for table in tables], torch.int64)
        if any(table.first_column for table in tables)
        else None,
    )
