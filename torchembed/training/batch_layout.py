"""Batches of any kind: whether their shapes are fixed, and their way to a device."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.trees import map_tensors


def has_fixed_shape(batch: Any) -> bool:
    """Whether batches of the layout of ``batch`` have their shapes in common, and samples: bags of
    fixed hotness, no empty tensors."""
    if isinstance(batch, Tensor):
        return batch.numel() > 0
    if isinstance(batch, SparseFeatures):
        return batch.hotness is not None and batch.batch_size > 0
    if isinstance(batch, (tuple, list)):
        return all(map(has_fixed_shape, batch))
    if isinstance(batch, dict):
        return all(map(has_fixed_shape, batch.values()))
    if dataclasses.is_dataclass(batch):
        return all(has_fixed_shape(getattr(batch, f.name)) for f in dataclasses.fields(batch))
    return True


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` on ``device``, by its own ``to`` or as a tree of tensors; copies from pinned memory
    do not block."""
    if callable(getattr(batch, "to", None)):
        return batch.to(device, non_blocking=True)
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
