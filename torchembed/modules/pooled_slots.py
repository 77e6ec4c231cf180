"""Pooled vectors of all slots of a module, side by side."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchembed.core.types import Pooling
from torchembed.modules.slots import SlotRows
from torchembed.ops.pooled_lookup import LookupStore, pooled_lookup
from torchembed.ops.row_gradients import WeightGradient
from torchembed.tables import group_weight


def pooled_slots(
    rows: SlotRows,
    poolings: Sequence[Pooling],
    output_dtype: torch.dtype,
    weight_form: WeightGradient,
) -> Tensor:
    """``[B, sum of dims]``: the pooled vector of each slot, in slot order; one call for each group.

    Args:
        rows: of each slot's ids.
        poolings: of each slot; equal within a group.
    """
    groups = pooled_groups(rows, poolings, output_dtype, weight_form)
    if not groups:
        return torch.empty(rows.batch_size, 0, dtype=output_dtype, device=rows.device)
    if len(groups) == 1:
        return groups[0][1].flatten(1)
    columns = [vector for _, vectors in groups for vector in vectors.unbind(1)]
    order = [slot for slots, _ in groups for slot in slots]
    by_slot = dict(zip(order, columns, strict=True))
    return torch.cat([by_slot[slot] for slot in range(len(order))], dim=1)


def pooled_groups(
    rows: SlotRows,
    poolings: Sequence[Pooling],
    output_dtype: torch.dtype,
    weight_form: WeightGradient,
    store_of: Callable[[list[int]], LookupStore] | None = None,
) -> list[tuple[list[int], Tensor]]:
    """Of each group its slots and their pooled vectors, ``[B, slots, D]``; see
    :func:`pooled_slots`. ``store_of`` slots stores these elsewhere, as ``store`` of
    :func:`~torchembed.ops.pooled_lookup.pooled_lookup`."""
    groups = []
    for group_rows in rows.groups:
        entry, features, _ = group_rows
        vectors = pooled_lookup(
            group_weight(entry.group),
            features.values,
            offsets=features.offsets,
            hotness=features.hotness,
            batch_size=features.batch_size,
            num_features=len(entry.slots),
            per_id_weights=features.weights,
            pooling=poolings[entry.slots[0]],
            output_dtype=output_dtype,
            weight_form=weight_form,
            sink=group_rows.sink(),
            known_map=group_rows.gradient_map(poolings[entry.slots[0]]),
            store=None if store_of is None else store_of(entry.slots),
        )
        groups.append((entry.slots, vectors))
    return groups
