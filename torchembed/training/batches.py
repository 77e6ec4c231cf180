"""Batches of all ranks in lockstep, where ranks may have different numbers of batches."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from torchembed.core.features import SparseFeatures
from torchembed.core.ranks import any_rank_each, check_cpu_backend, gather_objects
from torchembed.data.batch import Batch, as_batch
from torchembed.training.epochs import Epochs
from torchembed.training.stop import StopSignal


class BatchLayout(NamedTuple):
    """Shape and dtypes of a rank's batches: enough to make an empty one."""

    num_dense: int
    keys: tuple[str, ...]
    id_dtype: torch.dtype
    hotness: tuple[int, ...] | None
    weight_dtype: torch.dtype | None

    @classmethod
    def of(cls, batch: Batch) -> "BatchLayout":
        """The layout of ``batch``."""
        sparse = batch.sparse
        return cls(
            num_dense=batch.dense.shape[1],
            keys=sparse.keys,
            id_dtype=sparse.values.dtype,
            hotness=sparse.hotness,
            weight_dtype=None if sparse.weights is None else sparse.weights.dtype,
        )

    def empty_batch(self) -> Batch:
        """A batch of this layout without samples, ``B = 0``."""
        has_offsets = self.hotness is None
        sparse = SparseFeatures(
            keys=self.keys,
            values=torch.empty(0, dtype=self.id_dtype),
            batch_size=0,
            offsets=torch.zeros(1, dtype=self.id_dtype) if has_offsets else None,
            hotness=self.hotness,
            weights=None if self.weight_dtype is None else torch.empty(0, dtype=self.weight_dtype),
        )
        return Batch(torch.empty(0, self.num_dense), sparse, torch.empty(0))


def in_step(
    batches: Iterable[object],
    device: torch.device | str | None,
    max_batches: int | None = None,
    stop: StopSignal | None = None,
) -> Iterator[Batch]:
    """Iterate over this rank's batches for as long as any rank has one.

    A rank that has run out gets empty batches (``B = 0``), so that it takes part in the others'
    collectives. Before each batch one all-reduce on the CPU tells whether any rank has one; no
    device waits.

    Args:
        batches: batches that :func:`~torchembed.data.batch.as_batch` takes. No more than
            ``max_batches`` are taken from an iterator, so a later call goes on from there. With
            :class:`~torchembed.training.Epochs` all ranks begin each epoch at the same step.
        device: the device to copy batches to; copies from pinned memory do not block. None leaves
            them where they are.
        max_batches: most batches to yield, the same on every rank; None for no limit.
        stop: once a rank is asked to stop, the batch under way is the last on every rank.

    Raises:
        ValueError: where the ranks' first batches differ in features or dense columns.
        RuntimeError: where the process group cannot carry CPU tensors.
    """
    check_cpu_backend()
    epochs = batches if isinstance(batches, Epochs) else None
    iterator = iter(batches)
    layout: BatchLayout | None = None
    num_yielded = 0
    while max_batches is None or num_yielded < max_batches:
        item = next(iterator, None)
        batch = None if item is None else as_batch(item)
        is_asked = stop is not None and stop.is_requested
        has_batch, is_last = any_rank_each(batch is not None, is_asked)
        if not has_batch:
            if epochs is not None and epochs.next_epoch():
                continue
            return
        if epochs is not None:
            epochs.count_step()
        if layout is None:
            layout = _agreed_layout(batch)
        batch = layout.empty_batch() if batch is None else batch
        yield batch if device is None else batch.to(device, non_blocking=True)
        num_yielded += 1
        if is_last and stop is not None:
            stop.is_agreed = True
            return


def _agreed_layout(batch: Batch | None) -> BatchLayout:
    """Compare the ranks' first batches, of which there is at least one, and return their layout."""
    layouts = gather_objects(None if batch is None else BatchLayout.of(batch))
    known = [layout for layout in layouts if layout is not None]
    for layout in known[1:]:
        if (layout.keys, layout.num_dense) != (known[0].keys, known[0].num_dense):
            raise ValueError(
                "batches must have the same features and dense columns on every rank, got "
                f"{list(known[0].keys)} with {known[0].num_dense} and {list(layout.keys)} with "
                f"{layout.num_dense}"
            )
    return known[0]
