"""Layouts of batches, what engines choose steps by, and batches on their way to a device.

A batch is a tree of any kind. Its parts are sparse features, ``SparseFeatures`` or TorchRec's
``KeyedJaggedTensor``, and dense tensors, which are in none of these.
"""

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

from torchembed.core.features import (
    Features,
    SparseFeatures,
    as_sparse_features,
    torchrec_class,
)
from torchembed.core.trees import (
    Tree,
    is_tensor,
    layout_of,
    leaves_in,
    map_leaves,
)

_UNCHANGEABLE = frozenset((Tensor, SparseFeatures, type(None)))
S = TypeVar("S", bound="Tensor | Features")


def is_part(node: object) -> TypeGuard[Tensor | Features]:
    """True where ``node`` is a tensor or sparse features."""
    return isinstance(node, (Tensor, SparseFeatures)) or is_features(node)


def is_features(node: Tree) -> TypeGuard[Features]:
    """True where ``node`` is sparse features that collections take."""
    if isinstance(node, SparseFeatures):
        return True
    kind = torchrec_class(node, "KeyedJaggedTensor")
    if kind is None or not isinstance(node, kind):
        return False
    return not node.variable_stride_per_key() and node.inverse_indices_or_none() is None


def map_parts(
    of_features: Callable[[Any], Tree], of_tensor: Callable[[Tensor], Tree], batch: Tree
) -> Tree:
    """``batch`` with ``of_features(part)`` in place of each of its sparse features, and
    ``of_tensor(part)`` in place of each dense tensor."""

    def function(part: Tensor | Features) -> Tree:
        return of_tensor(part) if isinstance(part, Tensor) else of_features(part)

    return map_leaves(function, batch, is_part)


def sparse_features(batch: Tree) -> list[Features]:
    """The sparse features of ``batch``, in its order."""
    return [part for part in leaves_in(batch, is_part) if not isinstance(part, Tensor)]


def dense_tensors(batch: Tree) -> list[Tensor]:
    """The dense tensors of ``batch``, in its order."""
    return [part for part in leaves_in(batch, is_part) if isinstance(part, Tensor)]


def with_sparse_features(batch: Tree) -> Tree:
    """``batch`` with ``SparseFeatures`` of the same tensors in place of ``KeyedJaggedTensor``s."""
    return map_leaves(as_sparse_features, batch, is_features)


def with_dense_tensors(batch: Tree, tensors: Iterable[Tensor]) -> Tree:
    """``batch`` with ``tensors`` in place of its :func:`dense_tensors`."""
    given = iter(tensors)
    return map_parts(_same, lambda _: next(given), batch)


def with_capacity(batch: Tree, num_ids: int) -> Tree:
    """A layout: ``batch`` with room for ``num_ids`` ids in each of its sparse features whose
    lengths vary; ids and weights are on the meta device."""

    def widened(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.new_empty(num_ids, device="meta")

    def with_room_for_ids(features: Features) -> SparseFeatures:
        sparse = as_sparse_features(features)
        if sparse.hotness is not None:
            return sparse
        values, weights = widened(sparse.values), widened(sparse.weights)
        return dataclasses.replace(sparse, values=values, weights=weights)

    return map_leaves(with_room_for_ids, batch, is_features)


def without_ids(batch: Tree, buffer: Tree) -> Tree:
    """``batch`` in new memory like that of ``buffer``, which may hold more ids, but for ids and
    their weights: these are on the meta device, where they have shapes alone. A
    ``KeyedJaggedTensor`` is there as a whole."""
    features_of_buffer, dense = iter(sparse_features(buffer)), iter(dense_tensors(buffer))

    def bare(features: Features) -> Features:
        like, found = next(features_of_buffer), features.to(torch.device("meta"))
        if not isinstance(found, SparseFeatures) or found.offsets is None:
            return found
        assert isinstance(like, SparseFeatures)
        assert like.offsets is not None
        return dataclasses.replace(found, offsets=torch.empty_like(like.offsets))

    return map_parts(bare, lambda _: torch.empty_like(next(dense)), batch)


def tensors_without_ids(batch: Tree, bare: Tree) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a ``batch`` in its buffer, and those of ``bare``, as :func:`without_ids` gives
    it, that hold the same."""
    sources, targets = dense_tensors(batch), dense_tensors(bare)
    pairs = zip(sparse_features(batch), sparse_features(bare), strict=True)
    for features, of_bare in pairs:
        if isinstance(of_bare, SparseFeatures) and of_bare.offsets is not None:
            assert isinstance(features, SparseFeatures)
            assert features.offsets is not None
            sources.append(features.offsets)
            targets.append(of_bare.offsets)
    return sources, targets


def num_ids_in(batch: Tree) -> int:
    """The most ids that one of the batch's sparse features holds, of those whose lengths vary."""
    values = (
        features.values if isinstance(features, SparseFeatures) else features.values()
        for features in sparse_features(batch)
        if not isinstance(features, SparseFeatures) or features.hotness is None
    )
    return max((ids.numel() for ids in values), default=0)


def has_fixed_shape(batch: Tree) -> bool:
    """True where the shapes of a batch follow from its layout: it has samples, its bags a fixed
    hotness, and none of its tensors has length 0."""
    shapes = _shapes(batch)
    return _has_samples(batch, shapes) and all(shape.hotness is not None for shape in shapes)


def jagged_layout(batch: Tree) -> Hashable:
    """A key that is equal for batches that differ in contents and in the lengths of bags alone;
    None where there are no sparse features with samples, or things that are no part of a tree."""
    shapes = _shapes(batch)
    if not shapes or not _has_samples(batch, shapes):
        return None
    return layout_of(map_leaves(shape_of, batch, is_features))


def lengths_digest(batch: Tree) -> int:
    """A 62-bit number, the same in every process, of what decides how the batch's ids are
    exchanged: for each of its sparse features the keys with their hotness, in any order, and the
    dtype of weights."""
    kinds = []
    for shape in _shapes(batch):
        hotness = shape.hotness or (-1,) * len(shape.keys)
        kinds.append((sorted(zip(shape.keys, hotness, strict=True)), shape.dtypes[-1]))
    # Sorted, since collections find features by key: another order of keys is the same exchange. 62
    # bits, so that the digest and its negative are int64.
    digest = hashlib.sha256(repr(kinds).encode()).digest()
    return int.from_bytes(digest[:8]) >> 2


class _Shape(NamedTuple):
    """All about sparse features but lengths and contents."""

    kind: str
    keys: tuple[str, ...]
    batch_size: int
    hotness: tuple[int, ...] | None
    dtypes: tuple[str, ...]
    is_cuda: bool


def shape_of(features: Features) -> _Shape:
    """All about ``features`` but lengths and contents."""
    kind = type(features).__name__
    if not isinstance(features, SparseFeatures):
        # Without TorchRec's offsets, which the host would have to compute from lengths.
        dtypes = _names(features.values(), features.weights_or_none())
        is_cuda = features.values().is_cuda
        return _Shape(kind, tuple(features.keys()), features.stride(), None, dtypes, is_cuda)
    dtypes = _names(features.values, features.offsets, features.weights)
    is_cuda = features.values.is_cuda
    return _Shape(kind, features.keys, features.batch_size, features.hotness, dtypes, is_cuda)


def _names(*tensors: Tensor | None) -> tuple[str, ...]:
    return tuple("none" if tensor is None else str(tensor.dtype) for tensor in tensors)


def _shapes(batch: Tree) -> list[_Shape]:
    return list(map(shape_of, sparse_features(batch)))


def is_on_gpu(batch: Tree) -> bool:
    """True where a part of ``batch`` is on a GPU."""
    parts = leaves_in(batch, is_part)
    return any((p if isinstance(p, Tensor) else shape_of(p)).is_cuda for p in parts)


def _has_samples(batch: Tree, shapes: list[_Shape]) -> bool:
    # Tensors without columns, as of a model without dense features, are no tensors without samples.
    has_dense = all(tensor.shape[:1] != (0,) for tensor in dense_tensors(batch))
    return has_dense and all(shape.batch_size > 0 for shape in shapes)


def num_samples(batch: Tree) -> int:
    """The number of samples of the batch's first sparse features, else the length of its first
    tensor; 1 where it has neither."""
    parts = batch if is_unchangeable(batch) else leaves_in(batch, is_part)
    for part in parts:
        if isinstance(part, SparseFeatures):
            return part.batch_size
        if part is not None and not isinstance(part, Tensor):
            return part.stride()
    return next((len(part) for part in parts if isinstance(part, Tensor) and part.dim()), 1)


def to_device(batch: Tree, device: torch.device) -> Tree:
    """``batch`` on ``device``, by its own ``to`` or as a tree of tensors and sparse features;
    copies from pinned memory do not block."""
    if _can_move(batch):
        does_not_block = {"non_blocking": True} if _takes_non_blocking(type(batch)) else {}
        moved = batch.to(device, **does_not_block)
        return batch if moved is None else moved  # one that moves itself
    return map_leaves(lambda part: part.to(device, non_blocking=True), batch, is_part)


def _can_move(batch: Tree) -> bool:
    # A mapping whose items are attributes too may raise for those that are not there.
    return callable(getattr(type(batch) if isinstance(batch, Mapping) else batch, "to", None))


@functools.cache
def _takes_non_blocking(kind: type) -> bool:
    try:
        parameters = inspect.signature(kind.to).parameters.values()  # type: ignore[attr-defined]
    except ValueError:
        return True  # of classes in C, tensors
    return any(p.name == "non_blocking" or p.kind is p.VAR_KEYWORD for p in parameters)


def only_moves(batch: Tree) -> bool:
    """True where the batch's own ``to`` does nothing but move tensors, so that captured steps,
    which copy these to memory of theirs, may go without it."""
    if is_part(batch) or not _can_move(batch):
        return True
    # A copy, since a batch may move itself.
    moved = to_device(with_own_containers(batch), torch.device("cpu"))
    before, after = (leaves_in(with_sparse_features(b), is_tensor) for b in (batch, moved))
    is_alike = type(moved) is type(batch) and len(before) == len(after)
    return is_alike and all(map(_has_same_contents, before, after))


def _has_same_contents(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.cpu(), other.cpu()
    return bool(((one == other) | ((one != one) & (other != other))).all())


def with_own_containers(batch: Tree) -> Tree:
    """``batch`` with the same tensors in containers of its own: what a model adds to them, or takes
    out, is not changed in ``batch``."""
    return batch if is_unchangeable(batch) else map_leaves(_same, batch, is_part)


def without_gradients(batch: Tree) -> Tree:
    """``batch`` with tensors that have no gradient, as all have but what a model adds to it."""
    tensors = batch if is_unchangeable(batch) else leaves_in(batch, is_part)
    if not any(isinstance(part, Tensor) and part.requires_grad for part in tensors):
        return batch
    return map_leaves(_detached, batch, is_part)


def _detached(part: Tensor | Features) -> Tensor | Features:
    return part.detach() if isinstance(part, Tensor) and part.requires_grad else part


def is_unchangeable(batch: Tree) -> bool:
    """True for a tuple of parts, the usual batch; walking a tree takes ten times as long, at each
    step."""
    return isinstance(batch, tuple) and _UNCHANGEABLE.issuperset(map(type, batch))


def _same(part: S) -> S:
    return part
