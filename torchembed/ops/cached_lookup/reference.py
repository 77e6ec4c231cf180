"""The specification of ``cached_lookup``, to be read."""

import torch
from torch import Tensor

from torchembed.core.cached_lookups import SCALE_BYTES, CachedLookup, LookupResults, empty_lookup
from torchembed.core.hash_tables import Policy, SlotTouch
from torchembed.ops.hash_table.reference import find_slots_reference, touch_slots_reference


def cached_lookup_reference(call: CachedLookup) -> LookupResults:
    slots = find_slots_reference(
        call.keys, call.tables, call.digests, call.slot_keys, call.geometry
    )
    touch = touch_of(call, slots)
    if touch is not None:
        touch_slots_reference(touch)
    return results_of(call, slots)


def touch_of(call: CachedLookup, slots: Tensor) -> SlotTouch | None:
    """Change the tables as the lookup does, and begin a new epoch."""
    if call.counters is None:
        return None
    if call.epoch is not None:
        call.epoch.add_(1)
    touched, epoch = call.touched, call.epoch
    if touched is None or epoch is None:
        # Hits and misses alone are counted: no element of an empty tensor is touched.
        touched, epoch = slots.new_zeros(call.digests.numel()), slots.new_ones(1)
    return SlotTouch(
        slots,
        call.tables,
        int(Policy.LRU),
        epoch,
        None,
        None,
        None,
        touched,
        None,
        call.counters,
    )


def results_of(call: CachedLookup, slots: Tensor) -> LookupResults:
    """The results where ids have ``slots``, -1 for none."""
    rows, out_slots, is_missing, num_missing = empty_lookup(call.keys, call.dim, reads=call.reads)
    is_id = call.tables >= 0
    is_missing.copy_(is_id & (slots < 0))
    num_missing.copy_(is_missing.sum())
    first_slot, num_blocks, num_buckets, num_slots = call.geometry.unbind(1)
    behind = first_slot + num_blocks * num_buckets * num_slots
    of_table = torch.nn.functional.pad(behind, (0, 1), value=-1)  # which index -1 reads
    out_slots.copy_(torch.where(slots < 0, of_table[call.tables.long()], slots))
    if call.reads:
        rows.zero_()
        rows[is_id] = _decoded(_lines(call, out_slots[is_id]), call.line_dtype, call.dim)
    return rows, out_slots, is_missing, num_missing


def _lines(call: CachedLookup, slots: Tensor) -> Tensor:
    """The lines of ``slots``, none of which is -1, from their copies where they have some."""
    found = call.lines[slots.to(call.lines.device)].to(slots.device)
    if call.copies is None or call.copy_of_line is None:
        return found
    copies = call.copy_of_line[slots].long()
    return torch.where((copies >= 0)[:, None], call.copies[copies], found)


def _decoded(lines: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    if dtype.itemsize > 1:
        return lines.contiguous().view(dtype)[:, :dim].float()
    scales = lines[:, :SCALE_BYTES].contiguous().view(torch.float32)
    codes = lines[:, SCALE_BYTES : SCALE_BYTES + dim].contiguous().view(dtype)
    return codes.float() * scales
