"""One training batch, and what else can be taken for one."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures, as_sparse_features


class Batch(NamedTuple):
    """Samples of one step on one rank; a plain ``(dense, sparse, labels)`` tuple."""

    dense: Tensor
    """``[B, num_dense]``, float32."""
    sparse: SparseFeatures
    """Ids of every categorical feature, ``B`` samples."""
    labels: Tensor
    """``[B]``, float32, 0 or 1."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch on ``device``."""
        dense, sparse, labels = self
        return Batch(
            dense.to(device, non_blocking=non_blocking),
            sparse.to(device, non_blocking=non_blocking),
            labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked host memory."""
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory())


def as_batch(item: Any, keys: Sequence[str] | None = None) -> Batch:
    """``item`` as a :class:`Batch`, sharing memory where its dtypes are those of one.

    Args:
        item: a ``Batch``; or ``(dense, sparse, labels)``; or an object with TorchRec's fields
            ``dense_features``, ``sparse_features`` and ``labels``. ``dense`` and ``labels`` are
            tensors or arrays, labels ``[B]`` or ``[B, 1]``. ``sparse`` is ``SparseFeatures``; a
            ``KeyedJaggedTensor``; ids ``[B, F]``, one for each sample and feature; or a mapping
            from feature to ids ``[B]`` or ``[B, hotness]``.
        keys: the features of ids ``[B, F]``; ``cat_0``, ``cat_1``, ... where None.

    Raises:
        TypeError: where ``item`` is none of these, or a part of it holds no numbers.
        ValueError: where the parts differ in their number of samples, or labels on the CPU are not
            0 or 1.
    """
    if isinstance(item, Batch):
        return item
    if hasattr(item, "dense_features") and hasattr(item, "sparse_features"):
        item = (item.dense_features, item.sparse_features, item.labels)
    if not isinstance(item, Sequence) or len(item) != 3:
        what = f"{len(item)} parts" if isinstance(item, Sequence) else type(item).__name__
        raise TypeError(f"a batch must be (dense, sparse, labels), got {what}")
    dense = _as_tensor(item[0], "dense").to(torch.float32)
    labels = _as_tensor(item[2], "labels").to(torch.float32)
    sparse = _as_features(item[1], keys)
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if dense.dim() != 2 or labels.dim() != 1:
        raise ValueError(
            "dense must be [B, num_dense] and labels [B] or [B, 1], "
            f"got {list(dense.shape)} and {list(labels.shape)}"
        )
    if not len(dense) == len(labels) == sparse.batch_size:
        raise ValueError(
            "dense, sparse and labels must have one number of samples, "
            f"got {len(dense)}, {sparse.batch_size} and {len(labels)}"
        )
    # On a GPU the check would make the host wait.
    if labels.device.type == "cpu":
        check_labels(labels)
    return Batch(dense, sparse, labels)


def check_labels(labels: Tensor) -> None:
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


def _as_features(sparse: object, keys: Sequence[str] | None) -> SparseFeatures:
    if isinstance(sparse, Mapping):
        ids = {key: _as_tensor(ids, f"ids of feature {key}") for key, ids in sparse.items()}
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
    if callable(getattr(sparse, "keys", None)) or isinstance(sparse, SparseFeatures):
        return as_sparse_features(sparse)
    ids = _as_tensor(sparse, "sparse")
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
