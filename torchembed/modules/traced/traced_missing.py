"""Vectors of ids without a row of dynamic tables in programs of ``torch.compile`` and
``torch.export``.

A compiled program asks the tables when it runs. An exported one holds their values as constants.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.modules.traced.program_op import define_program_op
from torchembed.modules.traced.traced_dynamic_rows import features_of_program, slots_of_program
from torchembed.ops.initialize_rows import InitialValues
from torchembed.ops.linearize_ids.reference import id_features
from torchembed.tables import Missing, MissingRows, MissingVectors, Table, table_numbered


def _by_position(found: MissingVectors) -> tuple[Tensor, Tensor]:
    """``found`` with a row for each position, ``[L, D]``: a shape that does not depend on what is
    missing."""
    is_missing, weight = found.rows >= 0, found.weight
    if not len(weight):
        weight = weight.new_zeros(1, weight.shape[1])
    places = torch.arange(len(found.rows), device=found.rows.device)
    return weight[found.rows.clamp_min(0)], places.where(is_missing, -1)


class _OfTables(NamedTuple):
    """The arguments of ``torchembed::missing_of_tables``."""

    values: Tensor
    rows: Tensor
    offsets: Tensor | None
    hotness: Sequence[int]
    batch_size: int
    is_valid: Tensor | None
    tables: Sequence[int]
    num_columns: int
    dtype: torch.dtype


def _of_tables(ids: _OfTables) -> tuple[Tensor, Tensor]:
    looked_up = [table_numbered(number) for number in ids.tables]
    group = looked_up[0].group
    features = features_of_program(
        ids.values, ids.offsets, ids.hotness, ids.batch_size, len(looked_up)
    )
    slots = slots_of_program(group, tuple(group.tables.index(table) for table in looked_up))
    return _by_position(group.missing_vectors(slots, features, ids.rows, ids.is_valid))


def _empty(ids: Tensor, num_columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Results of the shapes that :func:`_by_position` gives for ``ids [L]``."""
    weight = ids.new_empty(ids.shape[0], num_columns, dtype=dtype)
    return weight, ids.new_empty(ids.shape, dtype=torch.int64)


_of_tables_op = define_program_op(
    "missing_of_tables(Tensor values, Tensor rows, Tensor? offsets, SymInt[] hotness,"
    " SymInt batch_size, Tensor? is_valid, int[] tables, int num_columns, ScalarType dtype)"
    " -> (Tensor, Tensor)",
    _OfTables,
    _of_tables,
    lambda ids: _empty(ids.values, ids.num_columns, ids.dtype),
)


class _OfConstants(NamedTuple):
    """The arguments of ``torchembed::missing_of_constants``."""

    values: Tensor
    rows: Tensor
    offsets: Tensor | None
    hotness: Sequence[int]
    batch_size: int
    is_valid: Tensor | None
    tables: Sequence[int]
    constants: Tensor
    rows_of_tables: Tensor
    is_initial: Tensor
    initial: Sequence[Tensor]


def _of_constants(ids: _OfConstants) -> tuple[Tensor, Tensor]:
    values, device = ids.values, ids.values.device
    numbers = torch.tensor([*ids.tables, -1], dtype=torch.int32, device=device)
    slots = id_features(ids.offsets, list(ids.hotness), ids.batch_size, values.numel(), device)
    of_ids = numbers[slots].masked_fill(ids.rows >= 0, -1)
    if ids.is_valid is not None:
        of_ids = of_ids.masked_fill(~ids.is_valid, -1)
    known = InitialValues(*ids.initial) if ids.initial else None
    found = MissingRows(ids.constants, ids.rows_of_tables, ids.is_initial, known)
    return _by_position(found.vectors(values, of_ids))


_of_constants_op = define_program_op(
    "missing_of_constants(Tensor values, Tensor rows, Tensor? offsets, SymInt[] hotness,"
    " SymInt batch_size, Tensor? is_valid, int[] tables, Tensor constants, Tensor rows_of_tables,"
    " Tensor is_initial, Tensor[] initial) -> (Tensor, Tensor)",
    _OfConstants,
    _of_constants,
    lambda ids: _empty(ids.values, ids.constants.shape[1], ids.constants.dtype),
)


def traced_missing(
    features: SparseFeatures, tables: Sequence[Table], rows: Tensor, is_valid: Tensor | None = None
) -> MissingVectors | None:
    """The vectors of ids of ``features`` that have no row; None where they are zeros.

    Args:
        features: one for each slot.
        tables: of each slot, of one group.
        rows: ``[L]``, of the ids, -1 for none.
        is_valid: bool ``[L]``, False where there is no id; None: all positions of bags hold one.
    """
    if all(table.spec.missing is Missing.ZEROS for table in tables):
        return None
    group = tables[0].group
    batch = (
        features.values.contiguous(),
        rows,
        None if features.offsets is None else features.offsets.contiguous(),
        list(features.hotness or ()),
        features.batch_size,
        is_valid,
    )
    if not torch.compiler._is_exporting_flag:
        numbers = [table.number for table in tables]
        columns = tables[0].num_columns
        return MissingVectors(*_of_tables_op(*batch, numbers, columns, group.weight.dtype))
    group.find_missing_rows()
    known = group.missing_rows
    initial = [] if known.initial is None else [t for t in known.initial if t is not None]
    numbers = [group.tables.index(table) for table in tables]
    return MissingVectors(*_of_constants_op(*batch, numbers, *known[:3], initial))
