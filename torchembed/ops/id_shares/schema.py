"""Defines the operations on shares of ids and picks their kernels."""

import torch
from torch import Tensor

from torchembed.core.dispatch import define_op
from torchembed.ops.id_shares.checks import (
    check_are_in_share,
    check_are_in_share_contents,
    check_shares_of_ids,
)
from torchembed.ops.id_shares.reference import are_in_share_reference, shares_of_ids_reference


def _fake_shares(ids: Tensor, num_shares: int) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.int64)


def _fake_are_in_share(
    ids: Tensor, hotness: list[int], num_shares: Tensor, shares: Tensor, batch_size: int
) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.bool)


shares_of_ids_op = define_op(
    "shares_of_ids(Tensor ids, int num_shares) -> Tensor",
    reference=shares_of_ids_reference,
    fake=_fake_shares,
    triton="torchembed.triton_kernels.id_shares:launch_shares_of_ids",
    check=check_shares_of_ids,
)

are_in_share_op = define_op(
    "are_in_share(Tensor ids, int[] hotness, Tensor num_shares, Tensor shares,"
    " SymInt batch_size) -> Tensor",
    reference=are_in_share_reference,
    fake=_fake_are_in_share,
    triton="torchembed.triton_kernels.id_shares:launch_are_in_share",
    check=check_are_in_share,
    check_contents=check_are_in_share_contents,
)
