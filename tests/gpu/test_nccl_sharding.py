"""A sharded model trains as the unsharded one, over NCCL on every GPU of the machine."""

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.sharding.cases import assert_equal_training, train_sharded, train_unsharded
from tests.sharding.test_sharded_training import ALIKE, MATRIX, OTHERS

pytestmark = pytest.mark.gpu

CASES = [*ALIKE, *OTHERS, *MATRIX]


def test_sharded_equals_unsharded_on_all_gpus() -> None:
    num_ranks = torch.cuda.device_count()
    results = run_on_ranks(num_ranks, train_sharded, CASES, "cuda", backend="cpu:gloo,cuda:nccl")
    for number, case in enumerate(CASES):
        of_ranks = [rank_results[number] for rank_results in results]
        assert_equal_training(case, of_ranks, train_unsharded(case, num_ranks, "cuda"))
