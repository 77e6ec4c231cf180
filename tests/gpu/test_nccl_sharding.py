"""A sharded model trains as the unsharded one, over NCCL and by push, on 1, 2, 4 and 8 GPUs."""

import dataclasses

import pytest
import torch

from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import Case, assert_equal_training, train_sharded, train_unsharded
from tests.support.sharding_matrix import (
    ALIKE,
    MATRIX,
    ON_SOME_RANKS,
    OTHERS,
    on_two_nodes,
)
from torchembed.sharding import WireTransport

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("cases", [[*ALIKE, *OTHERS], MATRIX], ids=["placements", "matrix"])
@pytest.mark.parametrize("transport", WireTransport)
def test_sharded_equals_unsharded(
    num_ranks: int, cases: list[Case], transport: WireTransport
) -> None:
    if num_ranks > torch.cuda.device_count():
        pytest.skip(f"needs {num_ranks} GPUs, and {torch.cuda.device_count()} are here")
    if transport is WireTransport.PUSH:
        cases = [dataclasses.replace(c, transport=transport) for c in cases if c.pooled]
    elif num_ranks >= 4:
        cases = [*on_two_nodes(cases), *ON_SOME_RANKS]
    results = run_on_ranks(num_ranks, train_sharded, cases, "cuda", backend="cpu:gloo,cuda:nccl")
    for number, case in enumerate(cases):
        of_ranks = [rank_results[number] for rank_results in results]
        assert_equal_training(case, of_ranks, train_unsharded(case, num_ranks, "cuda"))
