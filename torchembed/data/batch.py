"""One training batch, and what else can be taken for one."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchembed.core.checks import as_signed, signed_ids
from torchembed.core.features import SparseFeatures, as_sparse_features
from torchembed.core.mixed_features import MixedFeatures
from torchembed.core.trees import Tree, map_tensors, tensors_in


class Batch(NamedTuple):
    """Samples of one step on one rank; a plain ``(dense, sparse, labels)`` tuple."""

    dense: Tensor | None
    """``[B, num_dense]``, float32; None where the model takes None."""
    sparse: SparseFeatures
    """Ids of every categorical feature, ``B`` samples; or ``MixedFeatures``, which models that give
    them to collections alone take for the same."""
    labels: Tree
    """``[B, ...]``, as the loss takes them: clicks, numbers, classes; or a tree of such tensors."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch on ``device``."""

        def moved(part: Tree) -> Tree:
            # Sparse features as a whole, which takes less time than their parts, at each step.
            if isinstance(part, (Tensor, SparseFeatures)):
                return part.to(device, non_blocking=non_blocking)
            return map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), part)

        return Batch(*map(moved, self))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked host memory."""
        return map_tensors(Tensor.pin_memory, self)


class WeightedBatch(NamedTuple):
    """A :class:`Batch` whose samples have weights: ``(dense, sparse, labels, weights)``."""

    dense: Tensor | None
    sparse: SparseFeatures
    labels: Tree
    weights: Tensor
    """``[B]`` or as the loss takes them, floating."""


class LabeledInputs(NamedTuple):
    """The inputs of a model that takes one argument, and labels: ``(inputs, labels)``."""

    inputs: Tree
    labels: Tree


def not_none(item: Tree) -> Tree:
    """``item``, which an iterator of batches gave.

    Raises:
        TypeError: for None.
    """
    if item is None:
        raise TypeError(
            "a batch must not be None, which is no end of the batches; leave it out where batches "
            "are read or collated"
        )
    return item


def as_batch(item: Any, keys: Sequence[str] | None = None) -> Batch:
    """``item`` as a :class:`Batch`, sharing memory where its dtypes are those of one.

    Args:
        item: a ``Batch``; or ``(dense, sparse, labels)``; or a mapping, dataclass, named tuple or
            other object with these names or with TorchRec's, ``dense_features``,
            ``sparse_features`` and ``labels``. ``dense`` is a tensor, array or lists
            ``[B, num_dense]``; None, or left out where parts have names, for a model that takes
            None. ``labels`` are a tensor, array or lists ``[B, ...]``, or several in a mapping or
            tuple; they keep their dtype. ``sparse`` is ``SparseFeatures``; ``MixedFeatures``; a
            ``KeyedJaggedTensor``; ids ``[B, F]``, one for each sample and feature; or a mapping
            from feature to ids ``[B]``, ``[B, hotness]`` or jagged ones, as a ``JaggedTensor`` or a
            nested tensor of torch.
        keys: the features of ids ``[B, F]``; ``cat_0``, ``cat_1``, ... where None.

    Raises:
        TypeError: if ``item`` is none of these, or a part of it holds no numbers.
        ValueError: if the parts differ in their number of samples.
    """
    if isinstance(item, Batch):
        return item
    parts = _parts_of(item)
    if len(parts) != 3:
        raise TypeError(f"a batch must be (dense, sparse, labels), got {_described(item)}")
    return Batch(*_converted(parts, keys)[:3])


def as_labeled_batch(item: Any) -> Batch | WeightedBatch | LabeledInputs:
    """``item`` in the form that a loss function of outputs and labels is computed from.

    Args:
        item: what :func:`as_batch` takes; or that with ``weights`` of the samples, as the fourth
            part or by name; or ``(inputs, labels)``, which are kept as they are.

    Raises:
        TypeError, ValueError: as :func:`as_batch`; says what else can be written.
    """
    if isinstance(item, (Batch, WeightedBatch, LabeledInputs)):
        return item
    parts = _parts_of(item)
    if len(parts) == 2:
        return LabeledInputs(*parts)
    if len(parts) not in (3, 4):
        raise TypeError(
            "a batch must be (inputs, labels), (dense, sparse, labels) or (dense, sparse, labels, "
            f"weights), or have parts of the latter names, got {_described(item)}"
            f"{_hint_for(item)}. For a model that is called with the whole batch give "
            "torchembed.training.BatchLoss(loss_fn), whose loss_fn is called as loss_fn(output, "
            "batch)"
        )
    try:
        converted = _converted(parts, None)
    except (TypeError, ValueError) as error:
        if _names_in(item):
            raise
        # Such as a user's ids, an item's ids and labels.
        names = ", ".join(_NAMES[: len(parts)])
        raise type(error)(
            f"{error}. A batch of {len(parts)} parts is ({names}) for model(dense, sparse); "
            "a model of other arguments takes (inputs, labels), or the whole batch with "
            "torchembed.training.BatchLoss(loss_fn) or, where it gives its loss, loss_fn=None"
        ) from error
    return Batch(*converted[:3]) if len(parts) == 3 else WeightedBatch(*converted)


def _hint_for(item: object) -> str:
    """A hint for callers that iterated a batch in place of batches; empty without a sign of it."""
    return (
        "; give a list or an iterator of batches, not one batch" if isinstance(item, Tensor) else ""
    )


_NAMES = ("dense", "sparse", "labels", "weights")
_TORCHREC_NAMES = ("dense_features", "sparse_features", "labels", "weights")


def _parts_of(item: Any) -> tuple[Any, ...]:
    """The parts of a batch in their order; none where it has other parts."""
    names = _names_in(item)
    for known in (_NAMES, _TORCHREC_NAMES):
        if names is None or not names.issuperset(known[1:3]):
            continue
        has_fields = isinstance(item, (Mapping, tuple)) or dataclasses.is_dataclass(item)
        # What would be left out here, the model or the loss might need.
        if has_fields and not names.issubset(known):
            return ()
        found = known if known[3] in names else known[:3]
        if isinstance(item, Mapping):
            return tuple(item.get(name) for name in found)
        return tuple(getattr(item, name, None) for name in found)
    return tuple(item) if isinstance(item, (tuple, list)) else ()


def _names_in(item: Any) -> frozenset[str] | None:
    """The names of the parts of ``item``; None where they have none."""
    if isinstance(item, Mapping):
        return frozenset(item)
    if dataclasses.is_dataclass(item):
        return frozenset(field.name for field in dataclasses.fields(item))
    if isinstance(item, tuple):
        return frozenset(getattr(item, "_fields", ()))
    return frozenset(name for name in (*_NAMES, *_TORCHREC_NAMES) if hasattr(item, name))


def _described(item: Any) -> str:
    if isinstance(item, (tuple, list)) and not hasattr(item, "_fields"):
        return f"{len(item)} parts"
    if isinstance(item, (Mapping, tuple)) or dataclasses.is_dataclass(item):
        return f"{type(item).__name__} of {', '.join(sorted(map(str, _names_in(item) or ())))}"
    return type(item).__name__


def _converted(parts: Sequence[Any], keys: Sequence[str] | None) -> tuple[Any, ...]:
    dense = None if parts[0] is None else _as_tensor(parts[0], "dense").to(torch.float32)
    sparse = _as_features(parts[1], keys)
    others = [_as_labels(part, name) for part, name in zip(parts[2:], _NAMES[2:], strict=False)]
    if dense is not None and dense.dim() != 2:
        raise ValueError(f"dense must be [B, num_dense], got {list(dense.shape)}")
    num_dense = sparse.batch_size if dense is None else len(dense)
    sizes = [len(tensor) if tensor.dim() else 0 for tensor in tensors_in(others)]
    if {num_dense, *sizes} != {sparse.batch_size}:
        what = "dense, sparse and labels" if len(others) == 1 else "all parts"
        raise ValueError(
            f"{what} must have one number of samples, "
            f"got {num_dense}, {sparse.batch_size} and {', '.join(map(str, sizes))}"
        )
    return dense, sparse, *others


def _as_labels(values: Any, name: str) -> Tree:
    """``values`` as a tensor, or as a mapping or tuple of tensors."""
    if isinstance(values, Mapping):
        return {key: _as_labels(part, f"{name} of {key}") for key, part in values.items()}
    if isinstance(values, tuple) and any(isinstance(part, Tensor) for part in values):
        return tuple(_as_labels(part, f"{name}[{n}]") for n, part in enumerate(values))
    return _as_tensor(values, name)


def as_probabilities(labels: Tensor) -> Tensor:
    """``labels`` as the log loss takes them: float32.

    Raises:
        ValueError: if one that is on the CPU is not from 0 to 1; on a GPU the check would make
            the host wait.
    """
    if labels.device.type == "cpu":
        bad = ~((labels >= 0) & (labels <= 1))
        if bad.any():
            place = int(bad.flatten().int().argmax())
            raise ValueError(
                "labels must be from 0 to 1 for a binary cross entropy, got "
                f"{labels.flatten()[place]:g} for sample {place // max(labels[0].numel(), 1)}; "
                "other loss functions take labels of any range"
            )
    return labels.to(torch.float32)


def check_clicks(labels: Tensor) -> None:
    """Raise ``ValueError`` with the first of ``labels [B]`` that is neither 0 nor 1."""
    bad = (labels != 0) & (labels != 1)
    if bad.any():
        sample = int(bad.int().argmax())
        raise ValueError(f"labels must be 0 or 1, got {labels[sample]:g} for sample {sample}")


def _as_tensor(values: object, name: str) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a tensor, or an array or lists of numbers, got "
            f"{type(values).__name__} ({error}); number or hash strings first"
        ) from error


def _as_features(sparse: object, keys: Sequence[str] | None) -> SparseFeatures | MixedFeatures:
    if isinstance(sparse, MixedFeatures):
        return sparse
    if isinstance(sparse, Mapping):
        jagged = {key: ids for key, ids in sparse.items() if _is_jagged(ids)}
        fixed = {key: ids for key, ids in sparse.items() if key not in jagged}
        if jagged:
            of_jagged = _jagged_features(jagged)
            return MixedFeatures((_fixed_features(fixed), of_jagged)) if fixed else of_jagged
        return _fixed_features(fixed)
    if callable(getattr(sparse, "keys", None)) or isinstance(sparse, SparseFeatures):
        return as_sparse_features(sparse)
    ids = signed_ids("sparse", _as_tensor(sparse, "sparse"))
    if ids.dim() != 2:
        raise ValueError(f"sparse must be ids [B, F], got {list(ids.shape)}")
    if keys is None:
        keys = tuple(f"cat_{feature}" for feature in range(ids.shape[1]))
    if len(keys) != ids.shape[1]:
        raise ValueError(f"keys must name {ids.shape[1]} features of sparse, got {len(keys)}")
    return SparseFeatures(
        keys=tuple(keys),
        values=ids.t().reshape(-1),
        batch_size=len(ids),
        hotness=(1,) * len(keys),
    )


def _is_jagged(ids: object) -> bool:
    """True for a jagged tensor of ids, torchembed's, TorchRec's or a nested one of torch."""
    if isinstance(ids, Tensor):
        return ids.is_nested and ids.layout is torch.jagged
    return all(callable(getattr(ids, name, None)) for name in ("values", "offsets"))


def _jagged_features(ids: Mapping[str, Any]) -> SparseFeatures:
    """Features of jagged tensors, none of which has ids behind its last bag."""
    sizes = {key: of_feature.offsets().numel() - 1 for key, of_feature in ids.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"jagged features must have one number of samples, got {sizes}")
    values = [as_signed(of_feature.values()) for of_feature in ids.values()]
    firsts = itertools.accumulate((part.numel() for part in values), initial=0)
    bounds = [of_feature.offsets() + n for of_feature, n in zip(ids.values(), firsts, strict=False)]
    return SparseFeatures(
        keys=tuple(ids),
        values=torch.cat(values),
        batch_size=next(iter(sizes.values())),
        offsets=torch.cat([bounds[0][:1], *(part[1:] for part in bounds)]),
    )


def _fixed_features(sparse: Mapping[str, object]) -> SparseFeatures:
    names = {key: f"ids of feature {key}" for key in sparse}
    ids = {key: signed_ids(names[key], _as_tensor(of, names[key])) for key, of in sparse.items()}
    shapes = {key: list(column.shape) for key, column in ids.items()}
    bad = [key for key, shape in shapes.items() if len(shape) not in (1, 2)]
    sizes = {shape[0] for key, shape in shapes.items() if key not in bad}
    if bad or len(sizes) != 1:
        raise ValueError(
            "sparse must map each feature to ids [B] or [B, hotness] with one B, "
            f"got the shapes {shapes}"
        )
    return SparseFeatures(
        keys=tuple(ids),
        values=torch.cat([column.reshape(-1) for column in ids.values()]),
        batch_size=sizes.pop(),
        hotness=tuple(shape[1] if len(shape) == 2 else 1 for shape in shapes.values()),
    )
