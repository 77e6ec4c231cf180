"""The mean of dense gradients, over NCCL and by push, under backward and with deferred ones."""

import pytest
import torch

from tests.support.gradient_means import assert_means

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("pushes", [False, True], ids=["nccl", "push"])
def test_the_mean_of_all_ranks(num_ranks: int, pushes: bool) -> None:
    if num_ranks > torch.cuda.device_count():
        pytest.skip(f"needs {num_ranks} GPUs, and {torch.cuda.device_count()} are here")
    deferrals = ("at once", "at the end", "on a stream")
    assert_means(num_ranks, "cuda", deferrals, "cpu:gloo,cuda:nccl", pushes=pushes)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_mean_of_two_nodes(num_ranks: int) -> None:
    if num_ranks > torch.cuda.device_count():
        pytest.skip(f"needs {num_ranks} GPUs, and {torch.cuda.device_count()} are here")
    deferrals = ("at once", "at the end", "on a stream")
    assert_means(num_ranks, "cuda", deferrals, "cpu:gloo,cuda:nccl", num_nodes=2)
