"""Conversion between TorchRec's batches and those that torchembed's pipeline takes."""

import array
import zlib
from collections.abc import Iterator
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchembed.core.features import SparseFeatures, as_sparse_features
from torchembed.core.trees import T, Tree, layout_of, map_tensors
from torchembed.sharding.transport.process_groups import BorrowedGroup
from torchembed.step.batches.batch_layout import map_parts, sparse_features, with_sparse_features

Hotness: TypeAlias = tuple[int, ...]
"""Number of ids in every bag of each key."""
ReadItem: TypeAlias = tuple[Tree]
"""A batch alone in a tuple, so that the pipeline moves its tensors and not a method of its own."""
RestoredFeatures: TypeAlias = dict[int, tuple[KeyedJaggedTensor, SparseFeatures]]
"""Each ``KeyedJaggedTensor`` of a batch and the ``SparseFeatures`` it was made of, by ``id``."""


def fixed_hotness(features: KeyedJaggedTensor) -> Hotness | None:
    """The hotness of ``features``; None where bags of a key differ, and where lengths are on a GPU,
    for which the host would wait."""
    lengths = features.lengths()
    if lengths.is_cuda or not features.stride():
        return None
    by_key = lengths.view(len(features.keys()), -1)
    first = by_key[:, :1]
    if not (by_key == first).all():
        return None
    hotness = tuple(first.flatten().tolist())
    return hotness if sum(hotness) * features.stride() == features.values().numel() else None


def _has_lengths(features: KeyedJaggedTensor, lengths: Tensor, hotness: Hotness) -> bool:
    """True where ``features`` have ``lengths``, which are of a fixed ``hotness``."""
    own = features.lengths()
    return (
        (own.device, own.dtype) == (lengths.device, lengths.dtype)
        and len(features.keys()) == len(hotness)
        and torch.equal(own, lengths)
        and features.values().numel() == sum(hotness) * features.stride()
    )


def unsupported_batch(batch: Tree) -> str | None:
    """Reason why torchembed's pipeline cannot take ``batch``; None where it can."""
    if layout_of(with_sparse_features(batch)) is not None:
        return None
    return (
        f"its batches are {type(batch).__name__}, and not tensors and KeyedJaggedTensors in "
        "tuples, lists, mappings, dataclasses and objects with a method to"
    )


class BatchReader:
    """Reads batches in a background thread and converts them to the form that all ranks train.

    Each ``KeyedJaggedTensor`` becomes ``SparseFeatures``: with a fixed hotness where all bags of a
    key have the same number of ids, in all features of the batch and on all ranks; else with
    offsets.

    Args:
        group: of the ranks, held while batches are read; None for one rank.
        device: the device of the steps; for a GPU batches are copied to pinned memory.
    """

    def __init__(self, group: BorrowedGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._known: tuple[Hotness, ...] | None = None
        """Hotness of the first batch that had a fixed one; steps are captured for that one."""
        self._lengths: dict[int, tuple[Tensor, Hotness]] = {}
        """For the number of a batch's features, the last lengths of a fixed hotness, and that."""

    def read(self, batches: Iterator[Tree]) -> ReadItem:
        """Read and convert the next batch. Collective.

        Raises:
            StopIteration: after the last one.
            RuntimeError: where another rank has ended, or failed to read.
            TypeError: for a batch that :func:`unsupported_batch` gives a reason against.
        """
        if self._device.type == "cuda":
            # The current device belongs to the thread; a new one would pin for the first GPU.
            torch.cuda.set_device(self._device)
        batch, error, hotness, assumed, converted = None, None, None, None, None
        try:
            # A batch that is None ends the iteration, as in TorchRec's pipelines.
            batch = next(batches, None)
            if batch is not None:
                hotness = self._hotness(batch)
                assumed = hotness if self._known in (None, hotness) else None
                converted = self._converted(batch, assumed)
                if layout_of(converted) is None:
                    reason = unsupported_batch(batch)
                    raise TypeError(f"the model's batches must stay alike, but {reason}")
        except Exception as caught:  # noqa: BLE001 - raised once the other ranks know
            error = caught
        has_read, has_batch, is_fixed = self._agree(error, batch, hotness)
        if error is not None:
            raise error
        if not has_read:
            raise RuntimeError("another rank failed to read its batch, and its error says more")
        if batch is None:
            raise StopIteration
        if not has_batch:
            raise RuntimeError(
                "every rank must have equally many batches, but this one has more than another; "
                "let them end together"
            )
        if is_fixed and self._known is None:
            self._known = hotness
        if assumed is not None and not is_fixed:  # another rank's batch has no fixed hotness
            converted = self._converted(batch, None)
        return (converted,)

    def _hotness(self, batch: Tree) -> tuple[Hotness, ...] | None:
        """The hotness of each of the batch's features; None where one of them has none."""
        given = cast("list[SparseFeatures | KeyedJaggedTensor]", sparse_features(batch))
        found = [
            features.hotness
            if isinstance(features, SparseFeatures)
            else self._fixed_hotness(number, features)
            for number, features in enumerate(given)
        ]
        fixed = tuple(hotness for hotness in found if hotness is not None)
        return fixed if fixed and len(fixed) == len(found) else None

    def _fixed_hotness(self, number: int, features: KeyedJaggedTensor) -> Hotness | None:
        """:func:`fixed_hotness`, which is as before where the lengths are."""
        before = self._lengths.get(number)
        if before is not None and _has_lengths(features, *before):
            return before[1]
        found = fixed_hotness(features)
        if found is not None:
            # A copy, since the iterator may write its next batch to the same memory.
            self._lengths[number] = features.lengths().clone(), found
        return found

    def _agree(
        self, error: Exception | None, batch: Tree, hotness: tuple[Hotness, ...] | None
    ) -> tuple[bool, bool, bool]:
        """Three flags: all ranks have read; all have a batch; all have the same fixed hotness."""
        flags = [error is None, batch is not None, hotness is not None]
        if self._group is None:
            return flags[0], flags[1], flags[2]
        code = zlib.crc32(repr(hotness).encode())
        # One minimum over code and -code gives its least and greatest value over the ranks.
        # torch.tensor() and dist.all_reduce() keep Python busy for longer, while steps wait for it.
        numbers = array.array("q", [*flags, code, -code])
        shared = torch.frombuffer(numbers, dtype=torch.int64)
        self._group.group.allreduce(shared, dist.ReduceOp.MIN).wait()
        read, has, fixed, least, most = numbers
        return bool(read), bool(has), bool(fixed) and least == -most

    def _converted(self, batch: Tree, hotness: tuple[Hotness, ...] | None) -> Tree:
        of_features = iter(hotness or ())

        def convert(features: SparseFeatures | KeyedJaggedTensor) -> SparseFeatures:
            if hotness is None or isinstance(features, SparseFeatures):
                return self._pinned(as_sparse_features(features))
            weights = features.weights_or_none()
            return SparseFeatures(
                keys=tuple(features.keys()),
                values=self._pinned(features.values()),
                batch_size=features.stride(),
                hotness=next(of_features),
                weights=None if weights is None else self._pinned(weights),
            )

        return map_parts(convert, self._pinned, batch)

    def _pinned(self, tree: T) -> T:
        if self._device.type != "cuda":
            return tree
        return map_tensors(_pinned_tensor, tree)


def _pinned_tensor(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()


class TorchrecBatchForm:
    """Restores TorchRec's form of batches, over the same tensors."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[Hotness, int, torch.device], Tensor] = {}

    def restore(self, batch: Tree) -> tuple[Tree, RestoredFeatures]:
        """``batch`` with a ``KeyedJaggedTensor`` in place of each ``SparseFeatures``, and these."""
        restored: RestoredFeatures = {}

        def to_keyed(features: SparseFeatures) -> KeyedJaggedTensor:
            keyed = self._keyed(features)
            restored[id(keyed)] = keyed, features
            return keyed

        return map_parts(to_keyed, lambda tensor: tensor, batch), restored

    def _keyed(self, features: SparseFeatures) -> KeyedJaggedTensor:
        keys, size = list(features.keys), features.batch_size
        if features.hotness is None:
            return KeyedJaggedTensor(
                keys=keys,
                values=features.values,
                weights=features.weights,
                offsets=features.offsets,
                stride=size,
            )
        form = features.hotness, size, features.values.device
        if form not in self._lengths:
            counts = torch.tensor(features.hotness, dtype=torch.int32)
            # Kept as long as captured steps may read it.
            self._lengths[form] = counts.repeat_interleave(size).to(form[2])
        return KeyedJaggedTensor(
            keys=keys,
            values=features.values,
            weights=features.weights,
            lengths=self._lengths[form],
            stride=size,
            length_per_key=[count * size for count in features.hotness],
        )
