"""Where bags begin and end, told the same way for jagged bags and for those of fixed hotness.

Kernels take one tensor of ``bounds``: the offsets ``[F * B + 1]`` of jagged bags, or, under FIXED,
the running sum ``[F + 1]`` of the ids that a sample has. The latter does not depend on the batch,
so it is copied to the device once and kept.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Bounds(NamedTuple):
    """Bounds of bags, and whether they are of fixed hotness."""

    tensor: Tensor
    fixed: bool

    def feature_steps(self, batch_size: int) -> tuple[int, int]:
        """``(stride, scale)``: feature f ends at position ``scale * tensor[(f + 1) * stride]``."""
        return (1, batch_size) if self.fixed else (batch_size, 1)


_captured: dict[int, Tensor] = {}
"""By address, what a CUDA graph has captured: a replay reads it however long ago that was."""


def bag_bounds(offsets: Tensor | None, hotness: Sequence[int], device: torch.device) -> Bounds:
    """The bounds of jagged bags by ``offsets``, else of ``hotness`` ids a bag for each feature.

    The host waits for ``device`` where a hotness is seen for the first time, and never after.
    """
    if offsets is not None:
        return Bounds(offsets, fixed=False)
    tensor = _running_sum(tuple(hotness), device)
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured.setdefault(tensor.data_ptr(), tensor)
    return Bounds(tensor, fixed=True)


@functools.lru_cache(maxsize=1024)
def _running_sum(hotness: tuple[int, ...], device: torch.device) -> Tensor:
    """``[F + 1]``, int64: 0, then the sums of ``hotness`` up to each feature."""
    return torch.tensor([0, *itertools.accumulate(hotness)], dtype=torch.int64, device=device)


@triton.jit
def bag_extent(bounds_ptr, bag, batch_size, inside, FIXED: tl.constexpr, INDEX: tl.constexpr):
    """First position and number of ids of each feature-major ``bag``; zeros where not ``inside``.

    Example: hotness (1, 3) and batch size 2, so bounds 0 1 4: bag 3 is sample 1 of feature 1; it
    starts at ``1 * 2 + 1 * 3 = 5`` and has 3 ids.
    """
    if FIXED:
        feature = bag // batch_size
        first = tl.load(bounds_ptr + feature, mask=inside, other=0)
        length = tl.load(bounds_ptr + feature + 1, mask=inside, other=0) - first
        start = first * batch_size + (bag % batch_size) * length
    else:
        start = tl.load(bounds_ptr + bag, mask=inside, other=0)
        length = tl.load(bounds_ptr + bag + 1, mask=inside, other=0) - start
    return start.to(INDEX), length.to(INDEX)
