"""The Triton kernels of ``shares_of_ids`` and ``are_in_share``.

Byte floor: each id read once and each result written once, 16 bytes an int64 id for shares and 9
for whether they are asked for; what is known of features stays in cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.random_bits import SHARE_KEY
from torchembed.triton_kernels.bags import bag_bounds
from torchembed.triton_kernels.launch_sizes import cdiv
from torchembed.triton_kernels.random_bits import random_bits
from torchembed.triton_kernels.row_blocks import index_type
from torchembed.triton_kernels.searching import count_not_above_each, most_entries

_BLOCK = 1024
_SHARE_KEY = tl.constexpr(SHARE_KEY)


@triton.jit
def _share_of(ids, num_shares):
    """The share of each of the int64 ``ids``, int64.

    Example: two shares of the ids -1 0 1 2: 0 1 1 1.
    """
    hashes = random_bits(tl.full([1], _SHARE_KEY, tl.uint64), ids)
    return (((hashes >> 32) * num_shares.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit(do_not_specialize=["num_ids", "num_shares"])
def _shares_of_ids_kernel(
    ids_ptr, shares_ptr, num_ids, num_shares, BLOCK: tl.constexpr, INDEX: tl.constexpr
):
    """``shares[p] = share_of(ids[p], num_shares)``.

    Example: three shares of the ids -1 0 1 2 3: 1 1 2 2 1.
    """
    position = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    ids = tl.load(ids_ptr + position, mask=inside, other=0).to(tl.int64)
    shares = _share_of(ids, tl.full([1], num_shares, tl.int64))
    tl.store(shares_ptr + position, shares, mask=inside)


@triton.jit(do_not_specialize=["num_ids", "bounds_scale"])
def _are_in_share_kernel(
    ids_ptr,
    bounds_ptr,
    num_shares_ptr,
    shares_ptr,
    is_in_share_ptr,
    num_ids,
    num_features,
    bounds_scale,
    BLOCK: tl.constexpr,
    MOST_FEATURES: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``result[p] = share_of(ids[p], num_shares[f]) == shares[f]`` for position p of feature f.

    Example: two features in 1 and 3 shares, of which 0 and 2 are asked for, batch size 2, hotness
    (1, 2): the ids -1 0 1 2 3 4, whose shares are 0 0 2 2 1 1, give 1 1 1 1 0 0.
    """
    first = tl.program_id(0).to(INDEX) * BLOCK
    position = first + tl.arange(0, BLOCK)
    inside = position < num_ids
    ids = tl.load(ids_ptr + position, mask=inside, other=0).to(tl.int64)
    feature = count_not_above_each(
        bounds_ptr + 1, num_features, first, 1, bounds_scale, BLOCK, MOST_FEATURES
    )
    num_shares = tl.load(num_shares_ptr + feature, mask=inside, other=1)
    share = tl.load(shares_ptr + feature, mask=inside, other=0)
    is_in_share = _share_of(ids, num_shares) == share
    tl.store(is_in_share_ptr + position, is_in_share, mask=inside)


def launch_shares_of_ids(ids: Tensor, num_shares: int) -> Tensor:
    """``torchembed::shares_of_ids``; see :func:`torchembed.ops.id_shares.shares_of_ids`."""
    shares = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    num_ids = ids.numel()
    if num_ids:
        with torch.cuda.device_of(ids):
            _shares_of_ids_kernel[(cdiv(num_ids, _BLOCK),)](
                ids, shares, num_ids, num_shares, BLOCK=_BLOCK, INDEX=index_type(ids)
            )
    return shares


def launch_are_in_share(
    ids: Tensor, hotness: list[int], num_shares: Tensor, shares: Tensor, batch_size: int
) -> Tensor:
    """``torchembed::are_in_share``; see :func:`torchembed.ops.id_shares.are_in_share`."""
    is_in_share = torch.empty(ids.shape, dtype=torch.bool, device=ids.device)
    num_ids, num_features = ids.numel(), num_shares.numel()
    if num_ids:
        with torch.cuda.device_of(ids):
            bounds = bag_bounds(None, hotness, ids.device)
            _are_in_share_kernel[(cdiv(num_ids, _BLOCK),)](
                ids,
                bounds.tensor,
                num_shares,
                shares,
                is_in_share,
                num_ids,
                num_features,
                batch_size,
                BLOCK=_BLOCK,
                MOST_FEATURES=most_entries(num_features),
                INDEX=index_type(ids),
            )
    return is_in_share
