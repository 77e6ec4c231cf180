"""Batches of sparse features of which some have fixed hotness and others bags of any length."""

import dataclasses
from collections.abc import Callable, Collection

import torch

from torchembed.core.features import SparseFeatures


@dataclasses.dataclass(frozen=True)
class MixedFeatures:
    """Sparse features of the same samples in several parts, each of fixed hotness or jagged.

    One jagged feature makes those of other parts no jagged ones: each is looked up, and exchanged
    between ranks, as its part allows. Collections take it in place of ``SparseFeatures``.

    Raises:
        ValueError: if parts have a key in common, or differ in their number of samples.
    """

    parts: tuple[SparseFeatures, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        # Trees of the same form are made with other things in the places of features.
        if not all(isinstance(part, SparseFeatures) for part in self.parts):
            return
        keys = self.keys
        if len(set(keys)) != len(keys):
            raise ValueError(f"parts must have different keys, got {list(keys)}")
        sizes = [part.batch_size for part in self.parts]
        if len(set(sizes)) != 1:
            raise ValueError(f"parts must have one number of samples, got {sizes}")

    @property
    def keys(self) -> tuple[str, ...]:
        """The features of all parts."""
        return tuple(key for part in self.parts for key in part.keys)

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return self.parts[0].batch_size

    def parts_with(self, keys: Collection[str]) -> list[SparseFeatures]:
        """The parts that have one of ``keys``.

        Raises:
            ValueError: if none has one of them.
        """
        missing = sorted(set(keys).difference(self.keys))
        if missing:
            raise ValueError(f"features must have the keys {missing}, got {list(self.keys)}")
        return [part for part in self.parts if not set(keys).isdisjoint(part.keys)]

    def _map(self, function: Callable[[SparseFeatures], SparseFeatures]) -> "MixedFeatures":
        return MixedFeatures(tuple(map(function, self.parts)))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "MixedFeatures":
        """The same batch on ``device``."""
        return self._map(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "MixedFeatures":
        """The same batch in page-locked host memory."""
        return self._map(SparseFeatures.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the caching allocator that ``stream`` uses this batch's tensors."""
        for part in self.parts:
            part.record_stream(stream)
