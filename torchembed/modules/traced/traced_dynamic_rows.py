"""Rows of the ids of dynamic tables in programs of ``torch.compile`` and ``torch.export``.

A compiled program finds ids where the tables have them when it runs, and admits those of a batch
that is trained as the module does. An exported one is for inference, maybe in another process: it
holds the hash tables as they were when it was exported.
"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.types import OnBadId
from torchembed.modules.lookup.bad_ids import check_offsets
from torchembed.modules.lookup.forward_admission import (
    admission_in_forward,
    check_not_admitted_ahead,
    is_trial,
)
from torchembed.modules.traced.program_op import define_program_op
from torchembed.ops.hash_table import int64_keys
from torchembed.ops.hash_table.schema import find_slots_op
from torchembed.ops.linearize_ids.reference import id_features
from torchembed.tables import (
    HashIndex,
    SlotIndex,
    Table,
    TableGroup,
    table_numbered,
    with_shared_rows,
)

_slots_of: "weakref.WeakKeyDictionary[TableGroup, tuple[object, dict[tuple[int, ...], SlotIndex]]]"
_slots_of = weakref.WeakKeyDictionary()
"""For each group its index, and slots over it by the tables that they look up."""


def slots_of_program(group: TableGroup, numbers: tuple[int, ...]) -> SlotIndex:
    """Slots of ``group`` that look up its tables of these ``numbers``."""
    index, slots = _slots_of.get(group, (None, {}))
    if index is not group.index:
        slots = {}
        _slots_of[group] = group.index, slots
    if numbers not in slots:
        slots[numbers] = group.index.for_tables(numbers)
    return slots[numbers]


def features_of_program(
    values: Tensor, offsets: Tensor | None, hotness: Sequence[int], batch_size: int, num_slots: int
) -> SparseFeatures:
    """The batch of a program, checked; its values are int64."""
    if offsets is not None:
        check_offsets(offsets, values.numel())
    return SparseFeatures(
        keys=tuple(map(str, range(num_slots))),
        values=int64_keys(values),
        batch_size=batch_size,
        offsets=offsets,
        hotness=tuple(hotness) if offsets is None else None,
    )


class _Admission(NamedTuple):
    """The arguments of ``torchembed::admitted_rows``."""

    num_admissions: Tensor
    values: Tensor
    offsets: Tensor | None
    hotness: Sequence[int]
    batch_size: int
    is_valid: Tensor | None
    tables: Sequence[int]
    first_rows: Sequence[int]
    is_trained: bool
    rows_dtype: torch.dtype


def _admitted(batch: _Admission) -> Tensor:
    looked_up = [table_numbered(number) for number in batch.tables]
    group = looked_up[0].group
    if any(table.group is not group for table in looked_up):
        names = ", ".join(table.spec.name for table in looked_up)
        raise RuntimeError(
            f"tables {names} were in one group when the program was compiled, and are not any "
            "more, since some of them were frozen, moved or given another optimizer; compile the "
            "model again after such changes"
        )
    features = features_of_program(
        batch.values, batch.offsets, batch.hotness, batch.batch_size, len(looked_up)
    )
    numbers = tuple(group.tables.index(table) for table in looked_up)
    slots = slots_of_program(group, numbers)
    if batch.is_trained and not is_trial():
        check_not_admitted_ahead(group)
        admission = admission_in_forward(None)
        rows = group.admit(slots, features, None, batch.is_valid, admission).long()
    else:
        rows = slots.route(features, OnBadId.ZERO, torch.int64, batch.is_valid).rows
    batch.num_admissions.add_(1)
    shifts = [
        first - group.first_rows[number]
        for first, number in zip(batch.first_rows, numbers, strict=True)
    ]
    return _shifted(rows, shifts, features).to(batch.rows_dtype)


def _shifted(rows: Tensor, shifts: Sequence[int], features: SparseFeatures) -> Tensor:
    """``rows`` plus a number for each slot; -1 for none stays."""
    if not any(shifts):
        return rows.clone()
    of_slots = torch.tensor([*shifts, 0], dtype=torch.int64, device=rows.device)
    hotness = list(features.hotness or ())
    slots = id_features(features.offsets, hotness, features.batch_size, rows.numel(), rows.device)
    return torch.where(rows < 0, -1, rows + of_slots[slots])


_admitted_op = define_program_op(
    "admitted_rows(Tensor(a!) num_admissions, Tensor values, Tensor? offsets, SymInt[] hotness,"
    " SymInt batch_size, Tensor? is_valid, int[] tables, int[] first_rows, bool is_trained,"
    " ScalarType rows_dtype) -> Tensor",
    _Admission,
    _admitted,
    lambda batch: batch.values.new_empty(batch.values.shape, dtype=batch.rows_dtype),
    # Tables change, too: their memory is no argument, and what is written of it nobody reads who
    # has not the rows that this returns. The count keeps calls in order, and each of them.
    mutates_args=("num_admissions",),
    # The replay of a graph would count no batch.
    tags=(torch.Tag.cudagraph_unsafe,),
)


class _HeldIds(NamedTuple):
    """The arguments of ``torchembed::rows_of_held_ids``."""

    values: Tensor
    offsets: Tensor | None
    hotness: Sequence[int]
    batch_size: int
    is_valid: Tensor | None
    digests: Tensor
    slot_keys: Tensor
    geometry: Tensor
    first_shared: Tensor | None
    num_shared: int
    tables: Sequence[int]
    shifts: Sequence[int]
    rows_dtype: torch.dtype


def _held(ids: _HeldIds) -> Tensor:
    num_slots, device = len(ids.tables), ids.values.device
    features = features_of_program(ids.values, ids.offsets, ids.hotness, ids.batch_size, num_slots)
    numbers = torch.tensor([*ids.tables, -1], dtype=torch.int32, device=device)
    slots = id_features(
        features.offsets, list(ids.hotness), ids.batch_size, ids.values.numel(), device
    )
    of_ids = numbers[slots]
    if ids.is_valid is not None:
        of_ids = of_ids.masked_fill(~ids.is_valid, -1)
    keys = features.values.contiguous()
    rows = find_slots_op(keys, of_ids, ids.digests, ids.slot_keys, ids.geometry)
    if ids.first_shared is not None:
        rows = with_shared_rows(rows, keys, of_ids, ids.first_shared, ids.num_shared)
    return _shifted(rows, ids.shifts, features).to(ids.rows_dtype)


_held_op = define_program_op(
    "rows_of_held_ids(Tensor values, Tensor? offsets, SymInt[] hotness, SymInt batch_size,"
    " Tensor? is_valid, Tensor digests, Tensor slot_keys, Tensor geometry, Tensor? first_shared,"
    " int num_shared, int[] tables, int[] shifts, ScalarType rows_dtype) -> Tensor",
    _HeldIds,
    _held,
    lambda ids: ids.values.new_empty(ids.values.shape, dtype=ids.rows_dtype),
)


def traced_dynamic_rows(
    features: SparseFeatures,
    tables: Sequence[Table],
    first_rows: Sequence[int],
    rows_dtype: torch.dtype,
    *,
    is_trained: bool,
    is_valid: Tensor | None = None,
) -> Tensor:
    """The row of each id of ``features [L]``, -1 for none, of dynamic ``tables`` of one group.

    Args:
        features: one for each slot.
        tables: of each slot.
        first_rows: number of the first row of each slot's table.
        rows_dtype: int32 or int64.
        is_trained: whether the program admits the ids of its batches.
        is_valid: bool ``[L]``, False where there is no id; None: all positions of bags hold one.
    """
    group = tables[0].group
    values = features.values.contiguous()
    offsets = None if features.offsets is None else features.offsets.contiguous()
    hotness = list(features.hotness or ())
    if torch.compiler._is_exporting_flag:
        index = group.index
        assert isinstance(index, HashIndex)
        state = index.hash_tables
        numbers = [group.tables.index(table) for table in tables]
        return _held_op(
            values,
            offsets,
            hotness,
            features.batch_size,
            is_valid,
            state.digests,
            state.keys,
            state.geometry,
            None if index.shared is None else index.shared.firsts,
            0 if index.shared is None else index.shared.num_rows,
            numbers,
            [
                first - group.first_rows[number]
                for first, number in zip(first_rows, numbers, strict=True)
            ],
            rows_dtype,
        )
    return _admitted_op(
        group.num_program_admissions,
        values,
        offsets,
        hotness,
        features.batch_size,
        is_valid,
        [table.number for table in tables],
        list(first_rows),
        is_trained,
        rows_dtype,
    )
