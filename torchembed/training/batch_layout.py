"""Batches of any kind: what is alike in them, and their way to a device."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures, as_sparse_features, torchrec_class
from torchembed.core.trees import layout_of, tensors_in


def map_parts(
    of_features: Callable[[Any], Any], of_tensor: Callable[[Tensor], Any], batch: Any
) -> Any:
    """``batch``, a tree, with a function's value in place of each ``SparseFeatures`` or
    ``KeyedJaggedTensor`` in it, and another's in place of each tensor that is in none of these."""
    if _is_features(batch):
        return of_features(batch)
    if isinstance(batch, Tensor):
        return of_tensor(batch)
    if isinstance(batch, (tuple, list)):
        parts = [map_parts(of_features, of_tensor, part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, dict):
        return {key: map_parts(of_features, of_tensor, part) for key, part in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        parts = {name: map_parts(of_features, of_tensor, getattr(batch, name)) for name in names}
        return dataclasses.replace(batch, **parts)
    return batch


def _is_features(node: Any) -> bool:
    """Also TorchRec's, where collections take it."""
    kind = torchrec_class(node, "KeyedJaggedTensor")
    if kind is None or not isinstance(node, kind):
        return isinstance(node, SparseFeatures)
    return not node.variable_stride_per_key() and node.inverse_indices_or_none() is None


def with_sparse_features(batch: Any) -> Any:
    """``batch``, whose ``KeyedJaggedTensor``s became ``SparseFeatures`` of the same tensors."""
    return map_parts(as_sparse_features, _same, batch)


def dense_tensors(batch: Any) -> list[Tensor]:
    """The tensors of ``batch`` that are not of its sparse features."""
    return tensors_in(map_parts(_nothing, _same, batch))


def has_fixed_shape(batch: Any) -> bool:
    """Whether batches of the layout of ``batch`` have their shapes in common, and samples: bags of
    fixed hotness, no empty tensors."""
    return _has_samples(batch, lambda features: features.hotness is not None)


def jagged_layout(batch: Any) -> Hashable:
    """Equal for batches that differ in contents and in the lengths of bags alone; None where there
    are no sparse features with samples, or things that are no part of a tree."""
    found: list[SparseFeatures] = []

    def shape_of(features: Any) -> Any:
        found.append(as_sparse_features(features))
        return type(features).__name__, *_shape_of(found[-1])

    layout = layout_of(map_parts(shape_of, _same, batch))
    return layout if found and _has_samples(batch, lambda _: True) else None


def _shape_of(features: SparseFeatures) -> tuple[Any, ...]:
    tensors = (features.values, features.offsets, features.weights)
    dtypes = tuple(None if tensor is None else str(tensor.dtype) for tensor in tensors)
    return features.keys, features.batch_size, features.hotness, dtypes


def _has_samples(batch: Any, accepts: Callable[[SparseFeatures], bool]) -> bool:
    """Whether no dense tensor is empty, and all features have samples and are accepted."""
    are_fine: list[bool] = []

    def look(features: Any) -> None:
        features = as_sparse_features(features)
        are_fine.append(features.batch_size > 0 and accepts(features))

    map_parts(look, lambda tensor: are_fine.append(tensor.numel() > 0), batch)
    return all(are_fine)


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` on ``device``, by its own ``to`` or as a tree of tensors and sparse features;
    copies from pinned memory do not block."""
    if callable(getattr(batch, "to", None)):
        return batch.to(device, non_blocking=True)

    def move(part: Any) -> Any:
        return part.to(device, non_blocking=True)

    return map_parts(move, move, batch)


def _same(part: Any) -> Any:
    return part


def _nothing(_: Any) -> None:
    return None
