"""Pooled vectors of all slots of a module, side by side."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchembed.core.types import Pooling
from torchembed.modules.lookup.slots import SlotRows
from torchembed.modules.lookup.table_lookup import look_up_pooled
from torchembed.ops.columns import join_columns
from torchembed.ops.pooled_lookup import LookupStore
from torchembed.ops.row_gradients import WeightGradient


def pooled_slots(
    rows: SlotRows,
    poolings: Sequence[Pooling],
    output_dtype: torch.dtype,
    weight_form: WeightGradient,
    num_reserved: int = 0,
) -> Tensor:
    """``[B, num_reserved + sum of dims]``: the pooled vector of each slot, in slot order; one call
    for each group.

    Args:
        rows: of each slot's ids.
        poolings: of each slot; equal within a group.
        num_reserved: columns before them, whose contents are undefined.
    """
    if len(rows.groups) == 1:
        # Empty features in front become the reserved columns, which saves a copy of all vectors.
        num_empty, rest = divmod(num_reserved, rows.groups[0].entry.group.weight.shape[1])
        if not rest:
            groups = pooled_groups(rows, poolings, output_dtype, weight_form, num_empty=num_empty)
            return groups[0][1].flatten(1)
    if not rows.groups:
        return torch.empty(rows.batch_size, num_reserved, dtype=output_dtype, device=rows.device)
    groups = pooled_groups(rows, poolings, output_dtype, weight_form)
    parts = [(slots, vectors.flatten(1)) for slots, vectors in groups]
    widths = {slot: vectors.shape[2] for slots, vectors in groups for slot in slots}
    return columns_of_slots(parts, [widths[slot] for slot in range(len(widths))], num_reserved)


def columns_of_slots(
    parts: Sequence[tuple[Sequence[int], Tensor]], widths: Sequence[int], num_reserved: int
) -> Tensor:
    """``[B, num_reserved + sum of widths]``: the columns of slots, whose numbers each part names,
    from the parts' ``[B, columns]``, in the order of the slots; reserved ones hold anything."""
    *begins, num_columns = itertools.accumulate(widths, initial=num_reserved)
    slots = [slot for of_part, _ in parts for slot in of_part]
    return join_columns(
        [values for _, values in parts],
        [begins[slot] for slot in slots],
        [widths[slot] for slot in slots],
        num_columns,
    )


def pooled_groups(
    rows: SlotRows,
    poolings: Sequence[Pooling],
    output_dtype: torch.dtype,
    weight_form: WeightGradient,
    store_of: Callable[[list[int]], LookupStore] | None = None,
    num_empty: int = 0,
) -> list[tuple[list[int], Tensor]]:
    """Slots of each group, and their pooled vectors, ``[B, num_empty + slots, D]``.

    Args:
        rows, poolings, output_dtype, weight_form: as for :func:`pooled_slots`.
        store_of: makes a ``store`` for the vectors of some slots, as
            :func:`~torchembed.ops.pooled_lookup.pooled_lookup` takes it.
        num_empty: features without ids before those of the slots.
    """
    groups = []
    for group_rows in rows.groups:
        entry, features = group_rows.entry, group_rows.features
        hotness, offsets = features.hotness, features.offsets
        if num_empty and hotness is not None:
            hotness = (0,) * num_empty + hotness
        elif num_empty and offsets is not None:
            offsets = torch.nn.functional.pad(offsets, (num_empty * features.batch_size, 0))
        vectors = look_up_pooled(
            entry.group,
            features.values,
            offsets=offsets,
            hotness=hotness,
            batch_size=features.batch_size,
            num_features=num_empty + len(entry.slots),
            per_id_weights=features.weights,
            pooling=poolings[entry.slots[0]],
            output_dtype=output_dtype,
            weight_form=weight_form,
            sink=group_rows.sink(),
            known_map=group_rows.gradient_map(poolings[entry.slots[0]], num_empty),
            store=None if store_of is None else store_of(entry.slots),
            missing=group_rows.missing(),
            fetched=group_rows.fetched,
        )
        groups.append((entry.slots, vectors))
    return groups
