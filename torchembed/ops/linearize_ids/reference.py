"""The specification of ``linearize_ids`` in eager torch."""

import torch
from torch import Tensor

from torchembed.core.types import OnBadId


def id_features(
    offsets: Tensor | None, hotness: list[int], batch_size: int, num_ids: int, device: torch.device
) -> Tensor:
    """The feature of each id position, int64 ``[L]``; F where it belongs to no bag."""
    if offsets is None:
        counts = torch.tensor(hotness, device=device, dtype=torch.int64) * batch_size
        features = torch.arange(len(hotness), device=device)
        return torch.repeat_interleave(features, counts, output_size=num_ids)
    ends = offsets[batch_size::batch_size] if batch_size else offsets[:0]
    positions = torch.arange(num_ids, device=device, dtype=offsets.dtype)
    return torch.searchsorted(ends.contiguous(), positions, right=True)


def linearize_ids_reference(
    values: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    first_rows: Tensor,
    num_rows: Tensor,
    batch_size: int,
    on_bad_id: int,
    rows_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    features = id_features(offsets, hotness, batch_size, values.numel(), values.device)
    positions = torch.arange(values.numel(), device=values.device)
    in_bag = positions < (values.numel() if offsets is None else offsets[-1])
    ids = values.to(torch.int64)
    limit = torch.nn.functional.pad(num_rows, (0, 1))[features]
    first = torch.nn.functional.pad(first_rows, (0, 1))[features]
    bad = in_bag & ((ids < 0) | (ids >= limit))
    no_bad = torch.full((1,), values.numel(), device=values.device, dtype=torch.int64)
    first_bad = torch.cat([torch.where(bad, positions, values.numel()), no_bad]).amin().reshape(1)
    if on_bad_id == OnBadId.CLAMP:
        # A table without rows has nothing to clamp to: its ids become row -1.
        rows = first + ids.clamp_min(0).minimum(limit - 1)
        rows = torch.where(in_bag & (limit > 0), rows, -1)
    else:
        rows = torch.where(in_bag & ~bad, first + ids, -1)
    return rows.to(rows_dtype), first_bad


def locate_bad_id_reference(
    values: Tensor, first_bad: Tensor, bounds: Tensor | None, location: Tensor
) -> None:
    value = values[first_bad.clamp_max(values.numel() - 1)].long()
    if bounds is None:
        location.copy_(torch.cat([first_bad, value]), non_blocking=True)
        return
    feature = (bounds[1:] <= first_bad).sum(0, keepdim=True)
    found = torch.cat([first_bad, value, feature, bounds[feature].long()])
    location.copy_(found, non_blocking=True)
