"""Batches of sparse features, and the results of looking them up.

The classes read the like of TorchRec's ``KeyedJaggedTensor``, ``KeyedTensor`` and ``JaggedTensor``;
:func:`as_sparse_features` takes TorchRec's own by their methods, without importing TorchRec.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchembed.core import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseFeatures:
    """Ids of ``F`` features for ``B`` samples, feature-major.

    Bag ``(f, b)`` holds ``values[offsets[f * B + b]:offsets[f * B + b + 1]]``; or, where every bag
    of feature f has ``hotness[f]`` ids, no offsets are needed at all.
    """

    keys: tuple[str, ...]
    """Feature names, ``F`` of them, all different."""
    values: Tensor
    """``[L]``, int32 or int64."""
    batch_size: int
    offsets: Tensor | None = None
    """``[F * B + 1]``, int32 or int64; None where ``hotness`` is given."""
    hotness: tuple[int, ...] | None = None
    """Ids a bag for each feature; None where ``offsets`` is given."""
    weights: Tensor | None = None
    """``[L]``, floating: one for each id."""

    def __post_init__(self) -> None:
        checks.check_ids("values", self.values)
        if len(set(self.keys)) != len(self.keys):
            raise ValueError(f"keys must all be different, got {list(self.keys)}")
        if (self.offsets is None) == (self.hotness is None):
            given = "both" if self.offsets is not None else "neither"
            raise ValueError(f"give exactly one of offsets and hotness, got {given}")
        num_bags = len(self.keys) * self.batch_size
        if self.offsets is not None:
            checks.check_ids("offsets", self.offsets)
            checks.check_numel("offsets", self.offsets, num_bags + 1, "len(keys) * batch_size + 1")
        if self.hotness is not None:
            if len(self.hotness) != len(self.keys):
                raise ValueError(
                    f"hotness must hold {len(self.keys)} counts, one for each key, "
                    f"got {len(self.hotness)}"
                )
            num_ids = sum(self.hotness) * self.batch_size
            checks.check_numel("values", self.values, num_ids, "sum(hotness) * batch_size")
        if self.weights is not None:
            dtypes = (*checks.FLOAT_DTYPES, torch.float64)
            checks.check_dtype("weights", self.weights, dtypes, "call .float()")
            checks.check_numel("weights", self.weights, self.values.numel(), "one for each id")

    def _map(self, function: Any) -> "SparseFeatures":
        return dataclasses.replace(
            self,
            values=function(self.values),
            offsets=None if self.offsets is None else function(self.offsets),
            weights=None if self.weights is None else function(self.weights),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "SparseFeatures":
        """The same batch on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "SparseFeatures":
        """The same batch in page-locked host memory."""
        return self._map(Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the caching allocator that ``stream`` uses this batch's tensors."""
        for tensor in (self.values, self.offsets, self.weights):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)  # type: ignore[arg-type]


class KeyedTensor:
    """Pooled vectors of several keys side by side: ``values [B, sum of widths]``."""

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys, self._widths, self._values = list(keys), list(length_per_key), values

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        """``[B, sum of widths]``, in the order of ``keys()``."""
        return self._values

    def length_per_key(self) -> list[int]:
        return self._widths

    def to_dict(self) -> dict[str, Tensor]:
        """One ``[B, width]`` view for each key."""
        return dict(zip(self._keys, self._values.split(self._widths, dim=1), strict=True))

    def __getitem__(self, key: str) -> Tensor:
        return self.to_dict()[key]


class JaggedTensor:
    """Rows of different lengths: sample b holds ``values[offsets[b]:offsets[b + 1]]``."""

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        self._values, self._offsets = values, offsets

    def values(self) -> Tensor:
        """``[L, ...]``."""
        return self._values

    def offsets(self) -> Tensor:
        """``[B + 1]``."""
        return self._offsets

    def lengths(self) -> Tensor:
        """``[B]``."""
        return self._offsets.diff()


def torchrec_class(like: object, name: str) -> Any | None:
    """TorchRec's class ``name`` where ``like`` is an object of TorchRec's jagged-tensor module."""
    module = type(like).__module__
    if module != "torchrec.sparse.jagged_tensor":
        return None
    return getattr(sys.modules[module], name)


def as_sparse_features(features: Any) -> SparseFeatures:
    """``features`` itself, or the tensors of a ``KeyedJaggedTensor``, taken by its methods.

    Raises:
        TypeError: where ``features`` is neither.
        ValueError: where the batch size differs from key to key.
    """
    if isinstance(features, SparseFeatures):
        return features
    needed = ("keys", "values", "offsets", "weights_or_none", "stride")
    missing = [name for name in needed if not callable(getattr(features, name, None))]
    if missing:
        raise TypeError(
            "features must be SparseFeatures or a KeyedJaggedTensor, got "
            f"{type(features).__name__}, which has no {', '.join(missing)}"
        )
    if getattr(features, "variable_stride_per_key", lambda: False)():
        raise ValueError(
            "features must have one batch size for all keys, got a KeyedJaggedTensor with "
            "stride_per_key; pad it to one stride"
        )
    if getattr(features, "inverse_indices_or_none", lambda: None)() is not None:
        raise ValueError(
            "features must not have inverse_indices, which are not supported; index the pooled "
            "vectors by them instead"
        )
    return SparseFeatures(
        keys=tuple(features.keys()),
        values=features.values(),
        batch_size=features.stride(),
        offsets=features.offsets(),
        weights=features.weights_or_none(),
    )
