"""Sorting rows on a device: the library's own CUDA kernels, over only the bits that rows use, or
torch's where the library was built without them."""

import functools
import warnings
from typing import Protocol

import torch
from torch import Tensor


class Sort(Protocol):
    """Sorts rows, each in ``[-1, num_rows)``; those before ``count``, int64 ``[1]``, or all."""

    def __call__(
        self, rows: Tensor, num_rows: int, count: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The rows in stable order, int32, and the position that each had, int32. Neither is
        defined from ``count`` on."""
        ...


def _library_sort(
    rows: Tensor, num_rows: int, count: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    stream = torch.cuda.current_stream(rows.device).cuda_stream
    return torch.ops.torchembed_native.sort_rows(rows, num_rows, count, stream)


@functools.cache
def library_sort_on(device: torch.device) -> Sort | None:
    """The library's sort; None where it was built without CUDA, is not loaded or does not run."""
    has_sort = device.type == "cuda" and hasattr(torch.ops.torchembed_native, "sort_rows")
    return _that_runs(_library_sort, device) if has_sort else None


def _that_runs(sort: Sort, device: torch.device) -> Sort | None:
    """``sort``; None, with a warning, where it fails on ``device``: a driver that is older than the
    compiler cannot run its kernels."""
    try:
        sort(torch.zeros(1, dtype=torch.int32, device=device), 1)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        warnings.warn(
            f"torchembed sorts rows by torch's kernels, which is slower: its own do not run on "
            f"{device} ({reason}); build it with a CUDA toolkit that is no newer than the driver",
            stacklevel=2,
        )
        return None
    return sort


def sort_rows(rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The rows in stable order, int32 where they fit, and the position that each had."""
    if num_rows >= 2**31:
        sorted_rows, order = torch.sort(rows, stable=True)
        return sorted_rows, order
    sort = library_sort_on(rows.device)
    if sort is not None:
        return sort(rows, num_rows)
    sorted_rows, order = torch.sort(rows.to(torch.int32), stable=True)
    return sorted_rows, order


def order_of_keys(keys: Tensor, num_keys: int, count: Tensor) -> Tensor:
    """The positions of the first ``count``, int64 ``[1]``, of ``keys``, int32 ``[K]``, in their
    stable ascending order, ``[K]``; undefined from ``count`` on.

    Args:
        keys: in ``[0, num_keys)``; any of them from ``count`` on where the library sorts, else
            ``num_keys``.
    """
    sort = library_sort_on(keys.device)
    return torch.argsort(keys, stable=True) if sort is None else sort(keys, num_keys, count)[1]
