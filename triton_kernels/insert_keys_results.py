"""The Triton kernel that moves what ``insert_keys`` inserted to the front of its results."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.hash_tables import InsertionResults, KeyInsertion
from torchembed.triton_kernels.insert_keys_runs import NewKeyRuns
from torchembed.triton_kernels.launch_sizes import cdiv

_BLOCK = 1024


class InsertedRuns(NamedTuple):
    """For each run of equal new keys its place, and what was evicted from it; not written behind
    the last run."""

    is_inserted: Tensor
    """int32 ``[L]``; 0 behind the last run."""
    slots: Tensor
    """int64 ``[L]``; -1 for a key that was refused."""
    is_evicted: Tensor
    """int8 ``[L]``: whether another key was evicted, as which the next three say."""
    evicted_keys: Tensor
    """int64 ``[L]``."""
    evicted_scores: Tensor
    """int64 ``[L]``."""
    evicted_touched: Tensor
    """int64 ``[L]``."""


@triton.jit(do_not_specialize=["num_ids", "num_tables"])
def _insert_keys_results_kernel(
    order_ptr,
    orders_ptr,
    keys_ptr,
    slots_ptr,
    runs_ptr,
    run_starts_ptr,
    places_ptr,
    is_inserted_ptr,
    run_slots_ptr,
    run_evicted_ptr,
    run_evicted_keys_ptr,
    run_evicted_scores_ptr,
    run_evicted_touched_ptr,
    new_slots_of_ids_ptr,
    new_keys_ptr,
    new_tables_ptr,
    new_slots_ptr,
    num_new_ptr,
    is_evicted_ptr,
    evicted_keys_ptr,
    evicted_scores_ptr,
    evicted_touched_ptr,
    num_ids,
    num_tables,
    BLOCK: tl.constexpr,
):
    """Give each position its key's slot, and move the runs whose key was inserted to the front:
    run u to ``places[u] - 1``; entries behind them get no key.

    Example: runs of slots 3 -1 5: ``is_inserted = [1, 0, 1]``, ``places = [1, 1, 2]``: ``new_slots
    = [3, 5, -1]``, ``num_new = 2``.
    """
    # The same number is a sorted position, a run and an entry of the results, as in the lengths.
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = number < num_ids
    position = tl.load(order_ptr + number, mask=inside, other=0)
    table = tl.load(orders_ptr + position, mask=inside, other=0).to(tl.int64)
    is_new = inside & (table < num_tables)
    run_of_id = tl.load(runs_ptr + number, mask=is_new, other=1) - 1
    own = tl.load(run_slots_ptr + run_of_id, mask=is_new, other=-1)
    slot = tl.where(is_new, own, tl.load(slots_ptr + position, mask=inside, other=-1))
    tl.store(new_slots_of_ids_ptr + position, slot, mask=inside)

    taken = inside & (tl.load(is_inserted_ptr + number, mask=inside, other=0) != 0)
    entry = tl.load(places_ptr + number, mask=taken, other=1) - 1
    start = tl.load(run_starts_ptr + number, mask=taken, other=0)
    first = tl.load(order_ptr + start, mask=taken, other=0)
    key = tl.load(keys_ptr + first, mask=taken, other=0)
    of_table = tl.load(orders_ptr + first, mask=taken, other=0).to(tl.int32)
    evicts = taken & (tl.load(run_evicted_ptr + number, mask=taken, other=0) != 0)
    tl.store(new_keys_ptr + entry, key, mask=taken)
    tl.store(new_tables_ptr + entry, of_table, mask=taken)
    tl.store(new_slots_ptr + entry, tl.load(run_slots_ptr + number, mask=taken), mask=taken)
    tl.store(is_evicted_ptr + entry, evicts, mask=taken)
    old_key = tl.load(run_evicted_keys_ptr + number, mask=evicts, other=0)
    old_score = tl.load(run_evicted_scores_ptr + number, mask=evicts, other=0)
    last_use = tl.load(run_evicted_touched_ptr + number, mask=evicts, other=0)
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


def launch_insert_keys_results(
    insertion: KeyInsertion, runs: NewKeyRuns, inserted: InsertedRuns, results: InsertionResults
) -> None:
    """Write ``results``, of at least one key, on the current device."""
    num_ids, num_tables = insertion.keys.numel(), insertion.geometry.shape[0]
    _insert_keys_results_kernel[(cdiv(num_ids, _BLOCK),)](
        runs.order,
        runs.orders,
        insertion.keys,
        insertion.slots,
        runs.runs,
        runs.run_starts,
        torch.cumsum(inserted.is_inserted, 0, dtype=torch.int32),
        *inserted,
        *results,
        num_ids,
        num_tables,
        BLOCK=_BLOCK,
    )
