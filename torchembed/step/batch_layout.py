"""Batches of any kind: what is alike in them, and their way to a device."""

import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures, as_sparse_features, torchrec_class
from torchembed.core.trees import field_names, layout_of, tensors_in


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
    names = field_names(type(batch))
    if names is None:
        return batch
    parts = {name: map_parts(of_features, of_tensor, getattr(batch, name)) for name in names}
    return dataclasses.replace(batch, **parts)


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


def with_dense_tensors(batch: Any, tensors: Iterable[Tensor]) -> Any:
    """``batch`` with ``tensors`` in place of its :func:`dense_tensors`."""
    given = iter(tensors)
    return map_parts(_same, lambda _: next(given), batch)


def with_room(batch: Any, num_ids: int) -> Any:
    """``batch`` with sparse features that have room for ``num_ids`` ids each, where lengths vary;
    a layout, without contents."""

    def widened(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.new_empty(num_ids, device="meta")

    def with_room_for_ids(features: Any) -> SparseFeatures:
        features = as_sparse_features(features)
        if features.hotness is not None:
            return features
        values, weights = widened(features.values), widened(features.weights)
        return dataclasses.replace(features, values=values, weights=weights)

    return map_parts(with_room_for_ids, _same, batch)


def without_ids(batch: Any) -> Any:
    """``batch`` with its sparse features on the meta device."""

    def to_meta(features: Any) -> Any:
        return features.to(torch.device("meta"))

    return map_parts(to_meta, _same, batch)


def num_ids_in(batch: Any) -> int:
    """The most ids that sparse features in ``batch`` hold, of those whose lengths vary."""
    numbers = [0]

    def count(features: Any) -> None:
        if not isinstance(features, SparseFeatures):
            numbers.append(features.values().numel())
        elif features.hotness is None:
            numbers.append(features.values.numel())

    map_parts(count, _nothing, batch)
    return max(numbers)


def has_fixed_shape(batch: Any) -> bool:
    """Whether batches of the layout of ``batch`` have their shapes in common, and samples: bags of
    fixed hotness, no empty tensors."""
    shapes = _shapes(batch)
    return _has_samples(batch, shapes) and all(shape.hotness is not None for shape in shapes)


def jagged_layout(batch: Any) -> Hashable:
    """Equal for batches that differ in contents and in the lengths of bags alone; None where there
    are no sparse features with samples, or things that are no part of a tree."""
    shapes = _shapes(batch)
    if not shapes or not _has_samples(batch, shapes):
        return None
    return layout_of(map_parts(_shape_of, _same, batch))


def lengths_digest(batch: Any) -> int:
    """A 62-bit number, the same in every process, of what decides how the ids of ``batch`` travel
    between ranks: for each of its sparse features keys with their hotness, in any order, and the
    dtype of weights."""
    kinds = []
    for shape in _shapes(batch):
        hotness = shape.hotness or (-1,) * len(shape.keys)
        kinds.append((sorted(zip(shape.keys, hotness, strict=True)), shape.dtypes[-1]))
    digest = hashlib.sha256(repr(kinds).encode()).digest()
    return int.from_bytes(digest[:8]) >> 2


class _Shape(NamedTuple):
    """What sparse features are made of, but for lengths."""

    kind: str
    keys: tuple[str, ...]
    batch_size: int
    hotness: tuple[int, ...] | None
    dtypes: tuple[str, ...]
    is_cuda: bool


def _shape_of(features: Any) -> _Shape:
    """Without the offsets of TorchRec's features, which take time to find out on the host."""
    kind = type(features).__name__
    if not isinstance(features, SparseFeatures):
        dtypes = _names(features.values(), features.weights_or_none())
        is_cuda = features.values().is_cuda
        return _Shape(kind, tuple(features.keys()), features.stride(), None, dtypes, is_cuda)
    dtypes = _names(features.values, features.offsets, features.weights)
    is_cuda = features.values.is_cuda
    return _Shape(kind, features.keys, features.batch_size, features.hotness, dtypes, is_cuda)


def _names(*tensors: Tensor | None) -> tuple[str, ...]:
    return tuple("none" if tensor is None else str(tensor.dtype) for tensor in tensors)


def _shapes(batch: Any) -> list[_Shape]:
    """Of all sparse features in ``batch``."""
    found: list[_Shape] = []
    map_parts(lambda features: found.append(_shape_of(features)), _nothing, batch)
    return found


def is_on_gpu(batch: Any) -> bool:
    """Whether a part of ``batch`` is."""
    shapes, tensors = _shapes(batch), dense_tensors(batch)
    return any(part.is_cuda for part in (*shapes, *tensors))


def _has_samples(batch: Any, shapes: list[_Shape]) -> bool:
    has_dense = all(tensor.numel() > 0 for tensor in dense_tensors(batch))
    return has_dense and all(shape.batch_size > 0 for shape in shapes)


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
