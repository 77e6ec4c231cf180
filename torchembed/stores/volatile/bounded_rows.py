"""Lines of a bounded number of rows in host memory, in partitions, and which of them go."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchembed.core.hash_tables import Counter, Policy
from torchembed.core.key_partitions import partition_of
from torchembed.ops.hash_table import (
    BLOCK_SLOTS,
    BUCKET_SLOTS,
    HashTables,
    TableShape,
    empty_hash_tables,
    erase_if,
    erase_keys,
    find_slots,
    grow,
    insert_keys,
    moved_rows,
    slot_ranges,
)
from torchembed.stores.volatile.options import OverflowPolicy, VolatileOptions

_FIRST_CAPACITY = 64

_NEVER = torch.zeros(1, dtype=torch.int64)
_ALWAYS = torch.full((1,), torch.iinfo(torch.int64).max)


class FoundRows(NamedTuple):
    """Partitions and slots of keys, as they were at a time."""

    keys: Tensor
    """int64 ``[n]``."""
    partitions: Tensor
    """int32 ``[n]``."""
    slots: Tensor
    """int64 ``[n]``: slots of the index, -1 of keys that are not there. They hold as long as
    :attr:`BoundedRows.num_moves` is the same."""


class BoundedRows:
    """Lines by key. The index is one hash table for each partition, in one group; slots have the
    number of the row that holds the line, and rows are filled from the first one on.

    Methods that change it must run alone; others may run beside each other.

    Attributes:
        num_moves: how often slots of keys that were there changed.
    """

    def __init__(self, line_bytes: int, options: VolatileOptions) -> None:
        self._options = options
        is_counted = options.overflow_policy is OverflowPolicy.EVICT_LEAST_USED
        # Without a policy of its own that gives scores to keys: they start from none.
        self._policy = Policy.CALLER if is_counted else Policy.LRU
        shape = TableShape(1, BLOCK_SLOTS // BUCKET_SLOTS, BUCKET_SLOTS)
        self._shapes = [shape] * options.num_partitions
        self._index = empty_hash_tables(self._shapes, self._policy)
        self._row_of_slot = torch.zeros_like(self._index.keys)
        self._lines = np.empty((0, line_bytes), dtype=np.uint8)
        self._free = np.empty(0, dtype=np.int64)
        """Rows below ``_end`` that hold no line."""
        self._end = 0
        self.num_moves = 0

    def __len__(self) -> int:
        return int(self._index.counters[:, Counter.SIZE].sum())

    def keys(self) -> Tensor:
        """All keys in ascending order."""
        return self._index.keys[self._index.digests > 0].sort().values

    def find(self, keys: Tensor) -> FoundRows:
        """Find the slots of ``keys``."""
        partitions = self._partitions_of(keys)
        return FoundRows(keys, partitions, find_slots(self._index, keys, partitions))

    def read(self, found: FoundRows, lines: np.ndarray) -> Tensor:
        """Copy the lines of the keys that are there into ``lines``; which ones, bool ``[n]``."""
        is_found = found.slots >= 0
        if is_found.all():
            rows = self._row_of_slot[found.slots].numpy()
            np.take(self._lines, rows, axis=0, out=lines, mode="clip")
        else:
            rows = self._row_of_slot[found.slots[is_found]].numpy()
            lines[is_found.numpy()] = self._lines[rows]
        return is_found

    def note(self, found: FoundRows, num_moves: int, epoch: int) -> None:
        """Note that rows were read in ``epoch``, when there had been ``num_moves``."""
        slots = found.slots
        if num_moves != self.num_moves:
            slots = find_slots(self._index, found.keys, found.partitions)
        slots = slots[slots >= 0]
        if self._index.scores is not None:
            self._index.scores.index_add_(0, slots, torch.ones_like(slots))
        # What was written since then is not older for this read.
        self._index.touched[slots] = self._index.touched[slots].clamp_min(epoch)

    def write(self, keys: Tensor, lines: np.ndarray, epoch: int) -> None:
        """Write the lines of distinct ``keys``, whole or not at all."""
        found = self.find(keys)
        is_new = found.slots < 0
        rows = self._rows_for(int(is_new.sum()))
        slots = self._slots_for(found, epoch)
        self._take_rows(rows)
        self._row_of_slot[slots[is_new]] = torch.from_numpy(rows)
        self._index.touched[slots] = epoch
        self._lines[self._row_of_slot[slots].numpy()] = lines

    def delete(self, keys: Tensor) -> None:
        """Delete the lines of ``keys``."""
        slots = erase_keys(self._index, keys, self._partitions_of(keys), released=_ALWAYS)
        self._release(slots[slots >= 0].unique())

    def resolve_overflows(self) -> int:
        """Evict rows from the partitions that hold more than the margin; how many."""
        margin, num_left = self._options.overflow_margin_rows, self._options.num_rows_left
        if margin is None or num_left is None:
            return 0
        num_evicted = 0
        sizes = self._index.counters[:, Counter.SIZE].tolist()
        for partition, slots in enumerate(slot_ranges(self._shapes)):
            if sizes[partition] > margin:
                held = slots.of(self._index.digests).nonzero().flatten()
                going = held[self._coldest(held + slots.first_slot, sizes[partition] - num_left)]
                is_going = torch.zeros(slots.num_slots, dtype=torch.bool)
                is_going[going] = True
                erase_if(
                    self._index,
                    slots,
                    is_going,
                    reason=Counter.EVICTED_TARGET,
                    epoch=_ALWAYS,
                    released=_ALWAYS,
                )
                self._release(going + slots.first_slot)
                num_evicted += len(going)
        return num_evicted

    def copied(self) -> "BoundedRows":
        """Another one with the same lines."""
        copied = BoundedRows(self._lines.shape[1], self._options)
        copied._shapes = self._shapes
        index = self._index
        copied._index = HashTables(
            digests=index.digests.clone(),
            keys=index.keys.clone(),
            touched=index.touched.clone(),
            scores=None if index.scores is None else index.scores.clone(),
            geometry=index.geometry,
            counters=index.counters.clone(),
        )
        copied._row_of_slot = self._row_of_slot.clone()
        copied._lines = self._lines[: self._end].copy()
        copied._free, copied._end = self._free, self._end
        return copied

    def _partitions_of(self, keys: Tensor) -> Tensor:
        return partition_of(keys, self._options.num_partitions).int()

    def _rows_for(self, num_rows: int) -> np.ndarray:
        """Numbers of free rows; there is memory for them."""
        num_again = min(num_rows, len(self._free))
        end = self._end + num_rows - num_again
        if end > len(self._lines):
            # In place where the system can, and an eighth, so that little memory is never used.
            capacity = max(end, len(self._lines) * 9 // 8, _FIRST_CAPACITY)
            # Views of the lines live within calls alone, and no other one runs now.
            self._lines.resize((capacity, self._lines.shape[1]), refcheck=False)
        again = self._free[len(self._free) - num_again :]
        return np.concatenate([again, np.arange(self._end, end)])

    def _take_rows(self, rows: np.ndarray) -> None:
        num_again = min(len(rows), len(self._free))
        self._free = self._free[: len(self._free) - num_again]
        self._end += len(rows) - num_again

    def _slots_for(self, found: FoundRows, epoch: int) -> Tensor:
        """The slot of each key, a new one where it had none."""
        keys, partitions, slots = found
        scores = None if self._policy is Policy.LRU else torch.zeros_like(keys)
        try:
            while True:
                # No row is ever released to it, so that it evicts none and refuses some instead.
                slots = insert_keys(
                    self._index,
                    keys,
                    partitions,
                    slots,
                    policy=self._policy,
                    epoch=torch.tensor([epoch]),
                    released=_NEVER,
                    scores=scores,
                ).slots
                if (slots >= 0).all():
                    return slots
                self._grow()
                slots = find_slots(self._index, keys, partitions)
        except BaseException:
            is_new = found.slots < 0
            erase_keys(self._index, keys[is_new], partitions[is_new], released=_ALWAYS)
            raise

    def _grow(self) -> None:
        shapes = [shape._replace(num_blocks=2 * shape.num_blocks) for shape in self._shapes]
        grown = grow(self._index, self._shapes, shapes)
        num_slots = sum(shape.num_rows for shape in shapes)
        self._row_of_slot = moved_rows(self._row_of_slot, grown.new_slots, num_slots)
        self._index, self._shapes = grown.tables, shapes
        self.num_moves += 1

    def _coldest(self, slots: Tensor, num_rows: int) -> Tensor:
        """The positions of the ``num_rows`` of ``slots`` that go."""
        if self._options.overflow_policy is OverflowPolicy.EVICT_RANDOM:
            return torch.randperm(len(slots))[:num_rows]
        touched = self._index.touched[slots].numpy()
        if self._index.scores is None:
            order = np.argpartition(touched, num_rows - 1)
        else:
            order = np.lexsort((touched, self._index.scores[slots].numpy()))
        return torch.from_numpy(order[:num_rows])

    def _release(self, slots: Tensor) -> None:
        """Free the rows of slots that were erased."""
        if len(slots):
            self._free = np.concatenate([self._free, self._row_of_slot[slots].numpy()])
            self.num_moves += 1
