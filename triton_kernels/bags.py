"""Bounds of bags, in one form for jagged bags and for those of fixed hotness.

Kernels take one tensor of ``bounds``: the offsets ``[F * B + 1]`` of jagged bags, or, under FIXED,
the running sum ``[F + 1]`` of the ids that a sample has, followed by the features ``[F]``, hottest
first. The latter does not depend on the batch, so it is copied to the device once and kept.
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
"""Bounds that a CUDA graph has captured, by address: the graph may be replayed when the cache below
has long dropped them."""


def bag_bounds(offsets: Tensor | None, hotness: Sequence[int], device: torch.device) -> Bounds:
    """The bounds of jagged bags by ``offsets``, else of ``hotness`` ids a bag for each feature.

    The host waits for ``device`` where a hotness is seen for the first time, and never after.
    """
    if offsets is not None:
        return Bounds(offsets, fixed=False)
    # Kept by value, so that steps of one hotness copy nothing to the device and can be captured.
    tensor = _fixed_bounds(tuple(hotness), device)
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured.setdefault(tensor.data_ptr(), tensor)
    return Bounds(tensor, fixed=True)


@functools.lru_cache(maxsize=1024)
def _fixed_bounds(hotness: tuple[int, ...], device: torch.device) -> Tensor:
    """``[2 * F + 1]``, int64: 0, the sums of ``hotness`` up to each feature, then all features by
    falling hotness."""
    # Programs start in the order of their numbers: the longest first, and none is left alone at the
    # end of a launch.
    hottest_first = sorted(range(len(hotness)), key=lambda feature: -hotness[feature])
    bounds = [0, *itertools.accumulate(hotness), *hottest_first]
    return torch.tensor(bounds, dtype=torch.int64, device=device)


@triton.jit
def feature_at(bounds_ptr, place, num_features, FIXED: tl.constexpr):
    """The feature that programs at ``place`` take.

    Features are taken by falling hotness, so that the last programs of a launch are short; those of
    jagged bags, whose lengths the host does not know, in their own order.

    Example: hotness (1, 3): place 0 is feature 1.
    """
    if FIXED:
        feature = tl.load(bounds_ptr + num_features + 1 + place).to(tl.int32)
    else:
        feature = place
    return feature


@triton.jit
def bag_extent(
    bounds_ptr, feature, sample, batch_size, inside, FIXED: tl.constexpr, INDEX: tl.constexpr
):
    """First position of each ``sample``'s bag of ``feature``, and its number of ids: one number for
    all under FIXED, else zero where not ``inside``.

    Example: hotness (1, 3) and batch size 2, so bounds 0 1 4: the bag of sample 1 and feature 1
    starts at ``1 * 2 + 1 * 3 = 5`` and has 3 ids.
    """
    if FIXED:
        # Every bag of the feature has one length, so its bounds follow from two numbers.
        first = tl.load(bounds_ptr + feature)
        length = tl.load(bounds_ptr + feature + 1) - first
        start = first * batch_size + sample * length
    else:
        bag = feature.to(INDEX) * batch_size + sample
        start = tl.load(bounds_ptr + bag, mask=inside, other=0)
        length = tl.load(bounds_ptr + bag + 1, mask=inside, other=0) - start
    return start.to(INDEX), length.to(INDEX)
