"""Kernels that put the keys that are to be inserted into bins by their hashes.

Each table has ``2**bins_log2`` bins of equal ranges of hashes, so that the keys of one block of a
table are in a few neighbouring bins, whatever the number of its blocks. Bins are filled by counts
of atomic additions: within a bin keys have no order. Only keys that are to be inserted cost more
than reading their flags, while sorting costs the same for all positions.

Byte floor for each position: 21 bytes of its key, table, slot and flag read twice, 8 of its slot
and 4 of its rank written, 4 read. For each key to be inserted a sector of 32 bytes of its bin's
count, read and written, another of its bin's end, and 12 bytes written to the bin.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.hash_tables import KeyInsertion
from torchembed.triton_kernels.hash_places import hash_of_key
from torchembed.triton_kernels.launch_sizes import cdiv

_BLOCK = 1024
_KEYS_IN_BIN = 8
"""Distinct keys that a bin has on average where all positions bring one, to as many from each
table."""
_LEAST_BINS_LOG2 = 5


class KeyBins(NamedTuple):
    """The keys that are to be inserted, bin by bin."""

    keys: Tensor
    """int64 ``[L]``, where L positions bring keys; the first ``ends[-1]`` hold keys."""
    positions: Tensor
    """int32 ``[L]``, which positions brought them."""
    ends: Tensor
    """int32 ``[T << bins_log2]``, where the entries of each bin end in both."""
    bins_log2: int


@triton.jit
def bin_of_hash(hashed, table, BINS_LOG2: tl.constexpr):
    """The bin of each ``hashed`` of ``table``, int64.

    Example: ``BINS_LOG2 = 5``, table 1: hash 0 is in bin 32, hash ``2**64 - 1`` in bin 63.
    """
    in_table = (hashed >> (64 - BINS_LOG2)).to(tl.int64)
    return (table.to(tl.int64) << BINS_LOG2) + in_table


@triton.jit(do_not_specialize=["num_ids"])
def _key_bins_count_kernel(
    keys_ptr,
    tables_ptr,
    slots_ptr,
    wanted_ptr,
    is_trained_ptr,
    counts_ptr,
    ranks_ptr,
    slots_out_ptr,
    num_ids,
    BINS_LOG2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the keys that are to be inserted in each bin. ``ranks``: how many the key's bin held
    before it, and -1 for positions whose keys are not to be inserted. ``slots_out``: a copy of
    ``slots``.

    Example: ``tables = [0, -1, 0]``, ``slots = [-1, -1, 5]``: ``ranks = [0, -1, -1]``, and the bin
    of the first key counts 1.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    table = tl.load(tables_ptr + position, mask=inside, other=-1)
    slot = tl.load(slots_ptr + position, mask=inside, other=0)
    tl.store(slots_out_ptr + position, slot, mask=inside)
    is_new = (table >= 0) & (slot < 0)
    if wanted_ptr is not None:
        is_new &= tl.load(wanted_ptr + position, mask=inside, other=0) != 0
    if is_trained_ptr is not None:
        is_new &= tl.load(is_trained_ptr) != 0
    key = tl.load(keys_ptr + position, mask=is_new, other=0)
    bins = bin_of_hash(hash_of_key(key), table, BINS_LOG2)
    one = tl.full([BLOCK], 1, tl.int32)
    rank = tl.atomic_add(counts_ptr + bins, one, mask=is_new, sem="relaxed")
    tl.store(ranks_ptr + position, tl.where(is_new, rank, -1), mask=inside)


@triton.jit(do_not_specialize=["num_ids"])
def _key_bins_fill_kernel(
    keys_ptr,
    tables_ptr,
    ranks_ptr,
    ends_ptr,
    bin_keys_ptr,
    bin_positions_ptr,
    num_ids,
    BINS_LOG2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the key of each position that has a rank, and the position, to its bin.

    Example: key 7 of position 1 alone, ``ranks = [-1, 0]``: ``bin_keys[0] = 7``, ``bin_positions[0]
    = 1``.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.load(ranks_ptr + position, mask=position < num_ids, other=-1)
    is_new = rank >= 0
    key = tl.load(keys_ptr + position, mask=is_new, other=0)
    table = tl.load(tables_ptr + position, mask=is_new, other=0)
    bins = bin_of_hash(hash_of_key(key), table, BINS_LOG2)
    start = tl.load(ends_ptr + bins - 1, mask=is_new & (bins > 0), other=0)
    tl.store(bin_keys_ptr + start + rank, key, mask=is_new)
    tl.store(bin_positions_ptr + start + rank, position.to(tl.int32), mask=is_new)


def put_into_bins(insertion: KeyInsertion, slots: Tensor) -> KeyBins:
    """The keys that ``insertion`` is to insert; ``slots`` is filled with a copy of its slots."""
    keys, tables = insertion.keys, insertion.tables
    num_ids, num_tables = keys.numel(), max(insertion.geometry.shape[0], 1)
    bins_log2 = max(_LEAST_BINS_LOG2, (num_ids // (_KEYS_IN_BIN * num_tables)).bit_length())
    counts = keys.new_zeros(num_tables << bins_log2, dtype=torch.int32)
    bin_positions, ranks = keys.new_empty(2, num_ids, dtype=torch.int32)
    bin_keys = torch.empty_like(keys)
    grid = (cdiv(num_ids, _BLOCK),)
    sizes = {"BINS_LOG2": bins_log2, "BLOCK": _BLOCK}
    _key_bins_count_kernel[grid](
        keys,
        tables,
        insertion.slots,
        insertion.wanted,
        insertion.is_trained,
        counts,
        ranks,
        slots,
        num_ids,
        **sizes,
    )
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    _key_bins_fill_kernel[grid](
        keys, tables, ranks, ends, bin_keys, bin_positions, num_ids, **sizes
    )
    return KeyBins(bin_keys, bin_positions, ends, bins_log2)
