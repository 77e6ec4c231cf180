"""TorchRec's batches as our pipeline takes them, and back."""

import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchembed.core.features import SparseFeatures, as_sparse_features
from torchembed.core.trees import layout_of
from torchembed.step.batch_layout import map_parts, with_sparse_features


def fixed_hotness(features: KeyedJaggedTensor) -> tuple[int, ...] | None:
    """How many ids every bag of each key has; None where bags differ, or lie on a GPU, which would
    be waited for."""
    lengths = features.lengths()
    if lengths.is_cuda or not features.stride():
        return None
    by_key = lengths.view(len(features.keys()), -1)
    first = by_key[:, :1]
    if not (by_key == first).all():
        return None
    hotness = tuple(first.flatten().tolist())
    return hotness if sum(hotness) * features.stride() == features.values().numel() else None


def unfit(batch: Any) -> str | None:
    """Why our pipeline cannot take ``batch`` apart; None where it can."""
    if layout_of(with_sparse_features(batch)) is not None:
        return None
    return (
        f"its batches are {type(batch).__name__}, and not tensors and KeyedJaggedTensors in "
        "tuples, lists, dicts and dataclasses"
    )


class BatchReader:
    """Reads batches and brings them into the form in which all ranks train them, in a thread.

    Each of the ``KeyedJaggedTensor``s becomes ``SparseFeatures``: of fixed hotness where every bag
    of a key has as many ids, on all ranks and in all of the batch, else with offsets.

    Args:
        group: the ranks, through the CPU, of these batches' agreement alone; None for one rank.
        device: where batches go; for a GPU they are brought into pinned memory.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._known: tuple[tuple[int, ...], ...] | None = None
        """The hotness of the first batch that had a fixed one: graphs are for that."""

    def read(self, batches: Iterator[Any]) -> tuple[Any]:
        """The next batch, alone in a tuple: what moves it is the pipeline, not its own methods.

        Raises:
            StopIteration: after the last one.
            RuntimeError: where other ranks have more batches than this one, or fail to read.
            TypeError: for what :func:`unfit` finds unfit.
        """
        if self._device.type == "cuda":
            # Of this thread, which would take the first one.
            torch.cuda.set_device(self._device)
        batch, error, hotness = None, None, None
        try:
            # None is the end too, as TorchRec's pipelines have it.
            batch = next(batches, None)
            reason = None if batch is None else unfit(batch)
            if reason is not None:
                raise TypeError(f"the model's batches must stay alike, but {reason}")
            hotness = self._hotness(batch)
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
        return (self._converted(batch, hotness if is_fixed and hotness == self._known else None),)

    def _hotness(self, batch: Any) -> tuple[tuple[int, ...], ...] | None:
        """Of all features of ``batch``."""
        found: list[tuple[int, ...] | None] = []

        def look(features: Any) -> None:
            is_ours = isinstance(features, SparseFeatures)
            found.append(features.hotness if is_ours else fixed_hotness(features))

        map_parts(look, lambda _: None, batch)
        fixed = tuple(hotness for hotness in found if hotness is not None)
        return fixed if fixed and len(fixed) == len(found) else None

    def _agree(
        self, error: Exception | None, batch: Any, hotness: tuple[tuple[int, ...], ...] | None
    ) -> tuple[bool, bool, bool]:
        """Whether all ranks have read, have a batch, and have the same fixed hotness."""
        flags = [error is None, batch is not None, hotness is not None]
        if self._group is None:
            return flags[0], flags[1], flags[2]
        code = zlib.crc32(repr(hotness).encode())
        # The least of a number and of its negative are each other's where it is the same on all.
        numbers = torch.tensor([*flags, code, -code], dtype=torch.int64)
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self._group)
        read, has, fixed, least, most = numbers.tolist()
        return bool(read), bool(has), bool(fixed) and least == -most

    def _converted(self, batch: Any, hotness: tuple[tuple[int, ...], ...] | None) -> Any:
        of_features = iter(hotness or ())

        def convert(features: Any) -> SparseFeatures:
            if hotness is None or isinstance(features, SparseFeatures):
                return self._pinned(as_sparse_features(features))
            made = SparseFeatures(
                keys=tuple(features.keys()),
                values=features.values(),
                batch_size=features.stride(),
                hotness=next(of_features),
                weights=features.weights_or_none(),
            )
            return self._pinned(made)

        return map_parts(convert, self._pinned, batch)

    def _pinned(self, part: Any) -> Any:
        if self._device.type != "cuda":
            return part
        if isinstance(part, SparseFeatures):
            return part._map(self._pinned)
        return part if part.is_cuda or part.is_pinned() else part.pin_memory()


class TorchrecForm:
    """Batches in TorchRec's form again, made of the very tensors that the pipeline has."""

    def __init__(self) -> None:
        self._lengths: dict[Any, Tensor] = {}

    def restored(self, batch: Any) -> tuple[Any, dict[int, tuple[KeyedJaggedTensor, Any]]]:
        """``batch`` with ``KeyedJaggedTensor``s, and by their ``id`` what each was made of."""
        made: dict[int, tuple[KeyedJaggedTensor, Any]] = {}

        def restore(features: SparseFeatures) -> KeyedJaggedTensor:
            keyed = self._keyed(features)
            made[id(keyed)] = keyed, features
            return keyed

        return map_parts(restore, lambda tensor: tensor, batch), made

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
            # Kept, since captured steps read them.
            self._lengths[form] = counts.repeat_interleave(size).to(form[2])
        return KeyedJaggedTensor(
            keys=keys,
            values=features.values,
            weights=features.weights,
            lengths=self._lengths[form],
            stride=size,
            length_per_key=[count * size for count in features.hotness],
        )
