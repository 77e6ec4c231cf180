"""Values that ids without a row are looked up as in dynamic tables."""

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchembed.ops.hash_table import int64_keys
from torchembed.ops.initialize_rows import InitialValues, initialize_rows


class Missing(enum.Enum):
    """Values that an id without a row is looked up as, where they are no fixed vector."""

    ZEROS = "zeros"
    INITIAL = "initial"
    """The initial values of the row that the id would get."""


MissingValue: TypeAlias = Missing | tuple[float, ...]
"""A kind of values, or a vector."""


def as_missing(missing: object) -> MissingValue:
    """``missing`` as an enum or a tuple: from ``"zeros"``, ``"initial"``, or a vector as a sequence
    of numbers or a one-dimensional floating tensor.

    Raises:
        TypeError: for anything else.
        ValueError: for another word, another number of dimensions, or numbers that are not finite.
    """
    if isinstance(missing, Missing):
        return missing
    if isinstance(missing, str):
        try:
            return Missing[missing.upper()]
        except KeyError:
            raise ValueError(
                f'missing must be "zeros", "initial", a vector or HashedRows(...), got {missing!r}'
            ) from None
    if isinstance(missing, Tensor):
        if not missing.is_floating_point():
            raise TypeError(f"missing must be floating, got {missing.dtype}; call .float()")
        if missing.dim() != 1:
            raise ValueError(f"missing must have one dimension, got shape {tuple(missing.shape)}")
        missing = missing.tolist()
    is_vector = isinstance(missing, Sequence) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in missing
    )
    if not is_vector:
        raise TypeError(
            'missing must be "zeros", "initial", a vector of numbers or HashedRows(...), got '
            f"{missing!r}"
        )
    vector = tuple(map(float, missing))  # type: ignore[arg-type]
    for place, value in enumerate(vector):
        if not math.isfinite(value):
            raise ValueError(f"missing must hold finite numbers, got {value} at place {place}")
    return vector


def check_missing(name: str, missing: MissingValue, dim: int, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` where a vector is no row of the table, ``name`` in errors, that has
    ``dim`` columns of ``dtype``."""
    if isinstance(missing, Missing):
        return
    if len(missing) != dim:
        raise ValueError(
            f"missing of {name} must be a vector of embedding_dim = {dim} numbers, got "
            f"{len(missing)}"
        )
    largest = max(map(abs, missing))
    if largest > torch.finfo(dtype).max:
        raise ValueError(
            f"missing of {name} must hold numbers that are finite in {dtype}, got {largest}"
        )


class MissingVectors(NamedTuple):
    """Vectors of some positions of a batch, as rows of a small table."""

    weight: Tensor
    """``[N, D]``."""
    rows: Tensor
    """int64 ``[L]``: the row of each position, -1 for those that are not looked up here."""


class MissingRows(NamedTuple):
    """The values of ids without a row in the tables of a group; see :func:`missing_rows`."""

    constants: Tensor
    """``[T, D]``: the vector of each table, zeros where it has none."""
    rows: Tensor
    """int64 ``[T + 1]``: for each table its row of ``constants``, -1 where it has no vector. The
    last one is for positions of no table."""
    is_initial: Tensor
    """bool ``[T + 1]``: True for tables whose values are initial rows."""
    initial: InitialValues | None
    """None where no table's are."""

    @torch.no_grad()
    def vectors(self, ids: Tensor, tables: Tensor) -> MissingVectors:
        """The vectors of ``ids [L]`` that have no row; never waits for a GPU.

        Initial rows take memory for a row at each position.

        Args:
            ids: int64, int32, uint32 or uint64.
            tables: int32 ``[L]``, the table of each position, -1 where there is nothing to look up.
        """
        of_tables = tables.long()
        rows = self.rows[of_tables]
        if self.initial is None:
            return MissingVectors(self.constants, rows)
        num_constants, num_columns = self.constants.shape
        weight = self.constants.new_empty(num_constants + ids.numel(), num_columns)
        weight[:num_constants] = self.constants
        places = torch.arange(num_constants, weight.shape[0], device=ids.device)
        is_initial = self.is_initial[of_tables]
        made = places.where(is_initial, -1)
        initialize_rows(weight, (), made, int64_keys(ids), tables, self.initial)
        return MissingVectors(weight, rows.where(~is_initial, places))


def missing_rows(
    values: Sequence[MissingValue], num_columns: int, dtype: torch.dtype, initial: InitialValues
) -> MissingRows:
    """The values of ids without a row in the tables of a group, on the device of ``initial``.

    Args:
        values: of each table, the columns here where they are a vector.
        num_columns: of the tables.
        dtype: of their rows, to which vectors are rounded.
        initial: the initial rows of the tables.
    """
    device, none = initial.table_keys.device, (0.0,) * num_columns
    vectors = [none if isinstance(value, Missing) else value for value in values]
    rows = [-1 if isinstance(value, Missing) else n for n, value in enumerate(values)]
    is_initial = [value is Missing.INITIAL for value in values]
    return MissingRows(
        torch.tensor(vectors, dtype=dtype, device=device),
        torch.tensor([*rows, -1], device=device),
        torch.tensor([*is_initial, False], device=device),
        initial if any(is_initial) else None,
    )
