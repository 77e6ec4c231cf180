"""Vectors and gradients that GPUs store into each other's memory, and a GPU that does not come."""

import itertools
import re

import numpy as np
import pytest
import torch

from tests.support.pushing import (
    CASES,
    LATE,
    WIRES,
    assert_same_arrays,
    late_rank,
    vectors_and_gradients,
)
from tests.support.ranks import run_on_ranks
from torchembed.sharding import WireTransport

pytestmark = pytest.mark.gpu
BACKEND = "cpu:gloo,cuda:nccl"


def on_a_rank() -> list[list[list[np.ndarray]]]:
    pairs = list(itertools.product(CASES, WIRES))
    return [vectors_and_gradients(pairs, "cuda", transport) for transport in WireTransport]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_push_equals_the_all_to_all(num_ranks: int) -> None:
    if num_ranks > torch.cuda.device_count():
        pytest.skip(f"needs {num_ranks} GPUs, and {torch.cuda.device_count()} are here")
    for plain, pushed in run_on_ranks(num_ranks, on_a_rank, backend=BACKEND):
        assert_same_arrays(plain, pushed)


def test_a_gpu_that_does_not_come_is_an_error() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    first, second = run_on_ranks(2, late_rank, "cuda", 0.5, backend=BACKEND)
    assert re.match(LATE, first)
    assert not second
