"""Keyset files of HugeCTR's Embedding Training Cache: the distinct keys of one pass over data."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_DTYPES = {torch.int64: "<i8", torch.uint32: "<u4"}


def read_hugectr_keyset(path: str | Path, *, key_dtype: torch.dtype) -> Tensor:
    """The keys of a keyset file, int64 ``[n]``, in its order, as ids of a table.

    The file holds keys one after the other, in any order and without a header; it does not say of
    which dtype they are. :meth:`~torchembed.training.DiskReadAhead.announce_ids` has their rows
    read from the disk before the pass.

    Args:
        path: the file.
        key_dtype: of its keys: ``torch.int64``, as with ``i64_input_key=True`` of HugeCTR's solver,
            or ``torch.uint32``, which are taken as their numbers.

    Raises:
        FileNotFoundError: if there is no such file.
        TypeError: for another dtype.
        ValueError: if the file's size is that of no number of such keys.
    """
    if key_dtype not in _DTYPES:
        raise TypeError(f"key_dtype must be torch.int64 or torch.uint32, got {key_dtype!r}")
    path, dtype = Path(path), np.dtype(_DTYPES[key_dtype])
    num_bytes = path.stat().st_size
    if num_bytes % dtype.itemsize:
        hint = "cut off" if num_bytes % 4 else "cut off, or of torch.uint32 keys"
        raise ValueError(
            f"file {path} must have a multiple of {dtype.itemsize} bytes, as {key_dtype} keys "
            f"have, got {num_bytes}; it is {hint}"
        )
    return torch.from_numpy(np.fromfile(path, dtype=dtype).astype(np.int64))
