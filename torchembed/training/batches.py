"""Batches of all ranks in lockstep, where ranks may have different numbers of batches."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.mixed_features import MixedFeatures
from torchembed.core.ranks import any_rank_each, check_cpu_backend, gather_objects
from torchembed.core.trees import Tree, map_tensors
from torchembed.data.batch import Batch, LabeledInputs, WeightedBatch, as_batch, not_none
from torchembed.step.batches.batch_layout import to_device
from torchembed.training.epochs import Epochs
from torchembed.training.stop import StopSignal


class BatchLayout(NamedTuple):
    """Shape and dtypes of a rank's batches: enough to make an empty one."""

    num_dense: int | None
    """None where batches have no dense part."""
    sparse: SparseFeatures | MixedFeatures
    """Without samples, on the CPU."""
    labels: Tree
    """Without samples, on the CPU."""
    weights: Tensor | None
    """Weights of samples, likewise; None without."""

    @classmethod
    def of(cls, batch: Batch | WeightedBatch) -> "BatchLayout":
        """The layout of ``batch``."""
        weights = batch.weights if isinstance(batch, WeightedBatch) else None
        sparse: SparseFeatures | MixedFeatures = batch.sparse
        if isinstance(sparse, MixedFeatures):
            sparse = MixedFeatures(tuple(map(_empty_features, sparse.parts)))
        else:
            sparse = _empty_features(sparse)
        return cls(
            num_dense=None if batch.dense is None else batch.dense.shape[1],
            sparse=sparse,
            labels=map_tensors(_empty_like, batch.labels),
            weights=None if weights is None else _empty_like(weights),
        )

    def empty_batch(self) -> Batch | WeightedBatch:
        """A batch of this layout without samples, ``B = 0``."""
        dense = None if self.num_dense is None else torch.empty(0, self.num_dense)
        # Mixed ones are taken for the same.
        batch = Batch(dense, cast("SparseFeatures", self.sparse), self.labels)
        return batch if self.weights is None else WeightedBatch(*batch, self.weights)


class OtherLayout(NamedTuple):
    """The layout of batches of another form, of which no empty one is known."""

    kind: str
    """Their form in words: the name of their type, or ``(inputs, labels)``."""


def _empty_features(features: SparseFeatures) -> SparseFeatures:
    """Features of the same form without samples."""
    return dataclasses.replace(
        features,
        values=_empty_like(features.values),
        batch_size=0,
        offsets=None if features.offsets is None else _empty_like(features.offsets).new_zeros(1),
        weights=None if features.weights is None else _empty_like(features.weights),
    )


def _empty_like(tensor: Tensor) -> Tensor:
    return tensor.new_empty((0, *tensor.shape[1:]), device="cpu")


_END = object()
"""Stands for the item after the last one."""


def in_step(
    batches: Iterable[object],
    device: torch.device | str | None,
    max_batches: int | None = None,
    stop: StopSignal | None = None,
    convert: Callable[[object], Tree] = as_batch,
) -> Iterator[Tree]:
    """Iterate over this rank's batches for as long as any rank has one.

    A rank that has run out gets empty batches (``B = 0``), so that it takes part in the others'
    collectives. Before each batch one all-reduce on the CPU tells whether any rank has one; no
    device waits.

    Args:
        batches: batches that ``convert`` takes. No more than
            ``max_batches`` are taken from an iterator, so a later call goes on from there. With
            :class:`~torchembed.training.Epochs` all ranks begin each epoch at the same step.
        device: the device to copy batches to; copies from pinned memory do not block. None leaves
            them where they are.
        max_batches: most batches to yield, the same on every rank; None for no limit.
        stop: once a rank is asked to stop, the batch under way is the last on every rank.
        convert: gives the batch of what was read.

    Raises:
        ValueError: if the ranks' first batches differ in features or dense columns; or a rank
            has fewer than others of batches of which no empty one can be made, since they are not
            ``(dense, sparse, labels)``.
        RuntimeError: if the process group cannot carry CPU tensors.
    """
    check_cpu_backend()
    epochs = batches if isinstance(batches, Epochs) else None
    iterator = iter(batches)
    layout: BatchLayout | OtherLayout | None = None
    num_yielded = 0
    while max_batches is None or num_yielded < max_batches:
        item = next(iterator, _END)
        batch = None if item is _END else convert(not_none(item))
        is_asked = stop is not None and stop.is_requested
        has_batch, is_last, is_short = any_rank_each(batch is not None, is_asked, batch is None)
        if not has_batch:
            if epochs is not None and epochs.next_epoch():
                continue
            return
        if epochs is not None:
            epochs.count_step()
        if layout is None:
            layout = _agreed_layout(batch)
        if is_short and isinstance(layout, OtherLayout):
            raise ValueError(
                f"every rank must have equally many batches where they are {layout.kind} and not "
                "(dense, sparse, labels), of which a rank that has no more is given empty ones, "
                f"but {'this' if batch is None else 'another'} rank has run out of them"
            )
        if batch is None:
            assert isinstance(layout, BatchLayout)
            batch = layout.empty_batch()
        yield batch if device is None else to_device(batch, torch.device(device))
        num_yielded += 1
        if is_last and stop is not None:
            stop.is_agreed = True
            return


def _layout_of(batch: Tree) -> BatchLayout | OtherLayout | None:
    if batch is None:
        return None
    if isinstance(batch, (Batch, WeightedBatch)):
        return BatchLayout.of(batch)
    is_labeled = isinstance(batch, LabeledInputs)
    return OtherLayout("(inputs, labels)" if is_labeled else type(batch).__name__)


def _agreed_layout(batch: Tree) -> BatchLayout | OtherLayout:
    """Compare the ranks' first batches, of which there is at least one, and return their layout."""
    layouts = gather_objects(_layout_of(batch))
    known = [layout for layout in layouts if layout is not None]
    others = [layout for layout in known if isinstance(layout, OtherLayout)]
    if others:
        return others[0]
    of_batches = [layout for layout in known if isinstance(layout, BatchLayout)]
    first = of_batches[0]
    for layout in of_batches[1:]:
        if (layout.sparse.keys, layout.num_dense) != (first.sparse.keys, first.num_dense):
            raise ValueError(
                "batches must have the same features and dense columns on every rank, got "
                f"{list(first.sparse.keys)} with {first.num_dense} and "
                f"{list(layout.sparse.keys)} with {layout.num_dense}"
            )
    return first
