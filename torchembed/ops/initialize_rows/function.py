"""The public function ``initialize_rows``, and the initial values that it takes."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchembed.ops.initialize_rows.schema import initialize_rows_op


class InitialValues(NamedTuple):
    """Initial values of the rows of T tables, as functions of (table key, id, column)."""

    table_keys: Tensor
    """int64 ``[T]``, the key of each table."""
    kinds: Tensor
    """int32 ``[T]``, for each table a value of :class:`torchembed.core.types.InitializerKind`."""
    parameters: Tensor
    """float32 ``[T, 2]``: ``low`` and ``high - low`` of a uniform distribution, mean and standard
    deviation of a normal one, a constant and any number beside it."""
    first_columns: Tensor | None = None
    """int64 ``[T]``, the number in the whole table of the first column here; None: all zeros."""


def initialize_rows(
    weight: Tensor,
    states: Sequence[Tensor],
    rows: Tensor,
    ids: Tensor,
    tables: Tensor,
    values: InitialValues,
    *,
    num_new: Tensor | None = None,
    initial_state: float = 0.0,
) -> None:
    """Write the initial values of ``rows`` into ``weight``, and ``initial_state`` into the rows of
    ``states``.

    What row ``rows[i]`` gets is a function of its table's key, of ``ids[i]`` and of the column
    alone, and has the same bits on every device and in every kernel. Uniform and constant rows have
    the bits of :mod:`torchembed.tables.initializers`. Normal ones are near those, and not equal:
    logarithm and cosine are polynomials here, since libraries differ in the last bits of theirs.

    Entries with row -1, and those from ``num_new`` on, cost next to nothing. Each row stands in
    ``rows`` once at most, or with one id and table. Never synchronizes.

    Args:
        weight: float32, float16 or bfloat16 ``[R, D]``, changed.
        states: at most two, float32 ``[R, D]`` or ``[R]``, changed. Rows of these, and of
            ``weight``, are contiguous, with gaps between them or without.
        rows: int64 ``[N]``, rows of ``weight``; -1 for none.
        ids: int64 ``[N]``, the id of each row.
        tables: int32 ``[N]``, the table of each row, a number in ``[0, T)`` where there is a row.
        values: the initial values of each table.
        num_new: int64 ``[1]``, how many entries at the front count; None for all.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    if len(states) > 2:
        raise ValueError(f"states must be two tensors at most, got {len(states)}")
    state0, state1 = (*states, None, None)[:2]
    initialize_rows_op(
        weight,
        state0,
        state1,
        rows.contiguous(),
        ids.contiguous(),
        tables.contiguous(),
        num_new,
        *values,
        initial_state,
    )
