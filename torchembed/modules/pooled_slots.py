"""Pooled vectors of all slots of a module, side by side."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.types import Pooling
from torchembed.modules.slots import SlotRows
from torchembed.ops.pooled_lookup import pooled_lookup
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
    pooled: list[Tensor] = []
    order: list[int] = []
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
        )
        pooled.append(vectors)
        order.extend(entry.slots)
    if not pooled:
        return torch.empty(rows.batch_size, 0, dtype=output_dtype, device=rows.device)
    if len(pooled) == 1:
        return pooled[0].flatten(1)
    columns = [vector for vectors in pooled for vector in vectors.unbind(1)]
    by_slot = dict(zip(order, columns, strict=True))
    return torch.cat([by_slot[slot] for slot in range(len(order))], dim=1)
