"""Requirements of the operations on shares of ids on their arguments."""

import torch
from torch import Tensor

from torchembed.core import checks, contents
from torchembed.ops.bags import check_bags

MOST_SHARES = 2**31
"""So that no product with 32 bits exceeds 63."""


def check_shares_of_ids(ids: Tensor, num_shares: int) -> None:
    checks.check_ids("ids", ids)
    checks.check_contiguous("ids", ids)
    if not 0 < num_shares < MOST_SHARES:
        raise ValueError(f"num_shares must be positive and less than 2**31, got {num_shares}")


def check_are_in_share(
    ids: Tensor, hotness: list[int], num_shares: Tensor, shares: Tensor, batch_size: int
) -> None:
    checks.check_ids("ids", ids)
    checks.check_contiguous("ids", ids)
    checks.check_dtype("num_shares", num_shares, (torch.int64,), "call .long()")
    checks.check_dtype("shares", shares, (torch.int64,), "call .long()")
    checks.check_same_device("ids", ids, num_shares=num_shares, shares=shares)
    checks.check_contiguous("num_shares", num_shares)
    checks.check_contiguous("shares", shares)
    checks.check_numel("shares", shares, num_shares.numel(), "as num_shares has")
    check_bags("ids", ids, None, hotness, num_shares.numel(), batch_size)


def check_are_in_share_contents(
    ids: Tensor, hotness: list[int], num_shares: Tensor, shares: Tensor, batch_size: int
) -> None:
    advice = "each feature has as many shares as ranks hold rows of its table"
    contents.check_in_range("num_shares", num_shares, 1, MOST_SHARES, advice)
