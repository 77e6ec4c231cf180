"""The Triton kernel that moves what ``insert_keys`` inserted to the front of its results."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.hash_tables import InsertionResults
from torchembed.triton_kernels.launch_sizes import cdiv

_BLOCK = 256


class InsertedKeys(NamedTuple):
    """The keys that were inserted, with gaps between them, in the order of the results."""

    is_inserted: Tensor
    """int32 ``[L]``: 1 where there is one. The others hold nothing elsewhere."""
    keys: Tensor
    """int64 ``[L]``."""
    tables: Tensor
    """int32 ``[L]``."""
    slots: Tensor
    """int64 ``[L]``."""
    is_evicted: Tensor
    """int8 ``[L]``: whether another key was evicted, as which the next three say."""
    evicted_keys: Tensor
    """int64 ``[L]``."""
    evicted_scores: Tensor
    """int64 ``[L]``."""
    evicted_touched: Tensor
    """int64 ``[L]``."""


def empty_inserted_keys(keys: Tensor) -> InsertedKeys:
    """Memory of what is inserted of ``keys [L]``, none yet."""

    def like_keys(dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty_like(keys, dtype=dtype)

    return InsertedKeys(
        torch.zeros_like(keys, dtype=torch.int32),
        like_keys(),
        like_keys(torch.int32),
        like_keys(),
        like_keys(torch.int8),
        like_keys(),
        like_keys(),
        like_keys(),
    )


@triton.jit(do_not_specialize=["num_ids"])
def _insert_keys_results_kernel(
    places_ptr,
    is_inserted_ptr,
    taken_keys_ptr,
    taken_tables_ptr,
    taken_slots_ptr,
    taken_evicted_ptr,
    taken_evicted_keys_ptr,
    taken_evicted_scores_ptr,
    taken_evicted_touched_ptr,
    new_keys_ptr,
    new_tables_ptr,
    new_slots_ptr,
    num_new_ptr,
    is_evicted_ptr,
    evicted_keys_ptr,
    evicted_scores_ptr,
    evicted_touched_ptr,
    num_ids,
    BLOCK: tl.constexpr,
):
    """Move what was noted for inserted keys to the front, number i to ``places[i] - 1``; entries
    behind them get no key.

    Example: slots 3 and 5, ``is_inserted = [1, 0, 1]``, ``places = [1, 1, 2]``: ``new_slots = [3,
    5, -1]``, ``num_new = 2``.
    """
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = number < num_ids
    taken = inside & (tl.load(is_inserted_ptr + number, mask=inside, other=0) != 0)
    entry = tl.load(places_ptr + number, mask=taken, other=1) - 1
    evicts = taken & (tl.load(taken_evicted_ptr + number, mask=taken, other=0) != 0)
    old_key = tl.load(taken_evicted_keys_ptr + number, mask=evicts, other=0)
    old_score = tl.load(taken_evicted_scores_ptr + number, mask=evicts, other=0)
    last_use = tl.load(taken_evicted_touched_ptr + number, mask=evicts, other=0)
    key = tl.load(taken_keys_ptr + number, mask=taken, other=0)
    table = tl.load(taken_tables_ptr + number, mask=taken, other=0)
    slot = tl.load(taken_slots_ptr + number, mask=taken, other=0)
    tl.store(new_keys_ptr + entry, key, mask=taken)
    tl.store(new_tables_ptr + entry, table, mask=taken)
    tl.store(new_slots_ptr + entry, slot, mask=taken)
    tl.store(is_evicted_ptr + entry, evicts, mask=taken)
    tl.store(evicted_keys_ptr + entry, old_key, mask=taken)
    tl.store(evicted_scores_ptr + entry, old_score, mask=taken)
    tl.store(evicted_touched_ptr + entry, last_use, mask=taken)

    num_new = tl.load(places_ptr + num_ids - 1)
    is_spare = inside & (number >= num_new)
    zero = tl.zeros([BLOCK], tl.int64)
    tl.store(new_keys_ptr + number, zero, mask=is_spare)
    tl.store(new_tables_ptr + number, (zero - 1).to(tl.int32), mask=is_spare)
    tl.store(new_slots_ptr + number, zero - 1, mask=is_spare)
    tl.store(is_evicted_ptr + number, zero != 0, mask=is_spare)
    tl.store(evicted_keys_ptr + number, zero, mask=is_spare)
    tl.store(evicted_scores_ptr + number, zero, mask=is_spare)
    tl.store(evicted_touched_ptr + number, zero, mask=is_spare)
    if tl.program_id(0) == 0:
        tl.store(num_new_ptr, num_new.to(tl.int64))


def launch_insert_keys_results(inserted: InsertedKeys, results: InsertionResults) -> None:
    """Fill ``results``, but for the slots of all positions, with what was inserted."""
    num_ids = inserted.keys.numel()
    _insert_keys_results_kernel[(cdiv(num_ids, _BLOCK),)](
        torch.cumsum(inserted.is_inserted, 0, dtype=torch.int32),
        *inserted,
        *results[1:],
        num_ids,
        BLOCK=_BLOCK,
    )
