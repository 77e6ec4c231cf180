"""Rows of ids in programs of ``torch.compile`` and ``torch.export``.

What a program's ids and offsets are is known when it runs: one operation finds the rows there, and
raises for what the modules raise for.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.stand_ins import KeptTensors
from torchembed.core.types import OnBadId
from torchembed.modules.lookup.bad_ids import BadIdReport, check_offsets
from torchembed.modules.lookup.bad_ids_of_slots import SlotName, submit_bad_id
from torchembed.modules.traced.traced_dynamic_rows import traced_dynamic_rows
from torchembed.ops.linearize_ids import linearize_ids
from torchembed.tables import RangeFactory, Table

traced_bad_ids = BadIdReport()
"""The bad ids of all programs: these know no module to report them by."""

_numbers_on: KeptTensors[tuple[tuple[int, ...], torch.device], Tensor] = KeptTensors()


def _checked_rows(
    values: Tensor,
    offsets: Tensor | None,
    hotness: Sequence[int],
    batch_size: int,
    first_rows: Sequence[int],
    num_rows: Sequence[int],
    on_bad_id: int,
    rows_dtype: torch.dtype,
    tables: Sequence[str],
    features: Sequence[str],
) -> Tensor:
    if offsets is not None:
        check_offsets(offsets, values.numel())
    first = _numbers_on.get((tuple(first_rows), values.device), lambda: _int64(first_rows, values))
    counts = _numbers_on.get((tuple(num_rows), values.device), lambda: _int64(num_rows, values))
    rows, first_bad = linearize_ids(
        values,
        first,
        counts,
        offsets=offsets,
        hotness=list(hotness) if offsets is None else None,
        batch_size=batch_size,
        on_bad_id=OnBadId(on_bad_id),
        rows_dtype=rows_dtype,
    )
    if on_bad_id == OnBadId.RAISE:
        batch = SparseFeatures(
            keys=tuple(f"{feature}@{n}" for n, feature in enumerate(features)),
            values=values,
            batch_size=batch_size,
            offsets=offsets,
            hotness=tuple(hotness) if offsets is None else None,
        )
        names = [SlotName(*of_slot) for of_slot in zip(tables, features, num_rows, strict=True)]
        submit_bad_id(batch, first_bad, names, traced_bad_ids)
    return rows


@torch.inference_mode(mode=False)
def _int64(numbers: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=like.device)


def _fake(
    values: Tensor,
    offsets: Tensor | None,
    hotness: Sequence[int],
    batch_size: int,
    first_rows: Sequence[int],
    num_rows: Sequence[int],
    on_bad_id: int,
    rows_dtype: torch.dtype,
    tables: Sequence[str],
    features: Sequence[str],
) -> Tensor:
    return values.new_empty(values.shape, dtype=rows_dtype)


_checked_rows_op = torch.library.custom_op(
    "torchembed::checked_rows",
    _checked_rows,
    mutates_args=(),
    schema="(Tensor values, Tensor? offsets, SymInt[] hotness, SymInt batch_size, int[] first_rows,"
    " int[] num_rows, int on_bad_id, ScalarType rows_dtype, str[] tables, str[] features)"
    " -> Tensor",
    # It raises, which the replay of a graph would not.
    tags=(torch.Tag.cudagraph_unsafe,),
)
_checked_rows_op.register_fake(_fake)


def traced_rows(
    features: SparseFeatures,
    tables: Sequence[Table],
    names: Sequence[str],
    on_bad_id: OnBadId,
    first_rows: Sequence[int] = (0,),
    *,
    is_trained: bool,
    is_valid: Tensor | None = None,
) -> Tensor:
    """The row of each id of ``features [L]``, -1 for none; int32 where numbers of rows are less
    than 2**31, else int64.

    The program raises, when it runs, an IndexError for a bad id under ``OnBadId.RAISE`` (on a GPU
    at a later call), and on the CPU a ValueError for offsets that mark no bags.

    Args:
        features: one for each slot.
        tables: of each slot.
        names: of each slot's feature, for errors.
        first_rows: number of the first row of each slot's table.
        is_trained: whether the program admits ids to dynamic tables where gradients are computed.
        is_valid: bool ``[L]``, for dynamic tables alone: False where there is no id; None: all
            positions of bags hold one.
    """
    num_rows = [table.num_rows for table in tables]
    end = max([0, *(first + count for first, count in zip(first_rows, num_rows, strict=True))])
    rows_dtype = torch.int32 if end < 2**31 else torch.int64
    if tables and not isinstance(tables[0].spec.index, RangeFactory):
        return traced_dynamic_rows(
            features,
            tables,
            first_rows,
            rows_dtype,
            is_trained=is_trained and torch.is_grad_enabled(),
            is_valid=is_valid,
        )
    return _checked_rows_op(
        features.values.contiguous(),
        None if features.offsets is None else features.offsets.contiguous(),
        list(features.hotness or ()),
        features.batch_size,
        list(first_rows),
        num_rows,
        int(on_bad_id),
        rows_dtype,
        [table.spec.name for table in tables],
        list(names),
    )
