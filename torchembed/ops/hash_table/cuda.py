"""The C++ library's kernels of ``find_slots``, ``touch_slots`` and ``insert_keys`` for GPUs."""

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchembed import _native
from torchembed.core.dispatch import CudaKernel
from torchembed.core.hash_tables import KeyInsertion, Policy, SlotTouch

if TYPE_CHECKING:
    from torchembed.triton_kernels.insert_keys_results import InsertedKeys
    from torchembed.triton_kernels.key_bins import KeyBins

_COVERS = "all calls where its kernels run"
_DIGEST_ALIGNMENT = 16


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """True where the driver is not older than the compiler that made the library's kernels, as of
    its sort."""
    from torchembed.triton_kernels.sort_rows import library_sort_on

    return library_sort_on(device) is not None


def _takes(digests: Tensor) -> bool:
    return digests.data_ptr() % _DIGEST_ALIGNMENT == 0 and _runs_on(digests.device)


def _launch_find_slots(
    keys: Tensor, tables: Tensor, digests: Tensor, slot_keys: Tensor, geometry: Tensor
) -> object:
    """``torchembed::find_slots``; see :func:`torchembed.ops.hash_table.find_slots`."""
    if not _takes(digests):
        return NotImplemented
    with torch.cuda.device_of(keys):
        stream = torch.cuda.current_stream(keys.device).cuda_stream
        return torch.ops.torchembed_native.find_slots_on_gpu(
            keys, tables, digests, slot_keys, geometry, stream
        )


def _launch_touch_slots(touch: SlotTouch) -> object:
    """``torchembed::touch_slots``; see :func:`torchembed.ops.hash_table.touch_slots`."""
    if touch.policy not in (Policy.LRU, Policy.LFU) or not _runs_on(touch.slots.device):
        return NotImplemented
    with torch.cuda.device_of(touch.slots):
        stream = torch.cuda.current_stream(touch.slots.device).cuda_stream
        torch.ops.torchembed_native.touch_slots_on_gpu(
            touch.slots,
            touch.tables,
            touch.epoch,
            touch.is_trained,
            touch.touched,
            touch.scores,
            touch.counters,
            stream,
        )
    return None


def _launch_insert_keys(insertion: KeyInsertion) -> object:
    """``torchembed::insert_keys``; see :func:`torchembed.ops.hash_table.insert_keys`.

    The library inserts the keys; Triton puts them into bins before, and orders the results.
    """
    if not _takes(insertion.digests):
        return NotImplemented
    from torchembed.triton_kernels.insert_keys import insert_by

    return insert_by(_insert_binned_keys, insertion)


def _insert_binned_keys(
    insertion: KeyInsertion, bins: "KeyBins", slots: Tensor, inserted: "InsertedKeys", blocks: int
) -> None:
    torch.ops.torchembed_native.insert_binned_keys(
        *bins,
        insertion.policy,
        insertion.epoch,
        insertion.epoch_number,
        insertion.released,
        insertion.scores_in,
        insertion.digests,
        insertion.slot_keys,
        insertion.touched,
        insertion.scores,
        insertion.geometry,
        insertion.counters,
        slots,
        *inserted,
        blocks,
        torch.cuda.current_stream(slots.device).cuda_stream,
    )


def find_slots_kernel() -> CudaKernel | None:
    """The kernel; None where the library is not loaded or was built without CUDA."""
    return _native.cuda_kernel("find_slots_on_gpu", _launch_find_slots, _COVERS)


def touch_slots_kernel() -> CudaKernel | None:
    """Likewise."""
    covers = "calls under LRU and LFU where its kernels run"
    return _native.cuda_kernel("touch_slots_on_gpu", _launch_touch_slots, covers)


def insert_keys_kernel() -> CudaKernel | None:
    """Likewise."""
    return _native.cuda_kernel("insert_binned_keys", _launch_insert_keys, _COVERS)
