"""Arguments of lookups in caches that kernels and their callers share."""

from typing import NamedTuple

import torch
from torch import Tensor

SCALE_BYTES = 4
"""The bytes of the scale at the beginning of a line of elements of 8 bits."""
LINE_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
)


class CachedLookup(NamedTuple):
    """Arguments of ``torchembed::cached_lookup``, as every kernel takes them, in the order of the
    schema; :func:`torchembed.ops.cached_lookup.cached_lookup` says what they mean."""

    keys: Tensor
    tables: Tensor
    digests: Tensor
    slot_keys: Tensor
    geometry: Tensor
    lines: Tensor
    line_dtype: torch.dtype
    dim: int
    reads: bool
    copies: Tensor | None
    copy_of_line: Tensor | None
    touched: Tensor | None
    epoch: Tensor | None
    counters: Tensor | None
    progress: Tensor
    """These four are changed."""


def line_bytes(dtype: torch.dtype, dim: int) -> int:
    """The bytes of a line of ``dim`` elements; of 8 bits they come behind a scale, and zeros up to
    a multiple of four bytes follow."""
    if dtype.itemsize > 1:
        return dim * dtype.itemsize
    return SCALE_BYTES + -(-dim // SCALE_BYTES) * SCALE_BYTES


LookupResults = tuple[Tensor, Tensor, Tensor, Tensor]


def empty_lookup(keys: Tensor, dim: int, *, reads: bool) -> LookupResults:
    """Memory of the results for ``keys [L]``, not filled."""
    return (
        torch.empty(keys.shape[0] if reads else 0, dim, dtype=torch.float32, device=keys.device),
        torch.empty_like(keys),
        torch.empty_like(keys, dtype=torch.bool),
        keys.new_empty(1),
    )
