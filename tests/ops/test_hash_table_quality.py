"""How close full tables come to keeping the best keys of all.

A block keeps the best of its own keys, nearly, so what is lost follows from how unevenly keys fall
into blocks: of N keys in blocks of b slots, whose numbers of keys are about Poisson's with mean b,
those beyond b have no place: a share of 1 / sqrt(2 * pi * b), .0062 of blocks of 4096 slots. One
bucket of 128 slots for each key loses .035 by the same formula. The second choice of a bucket
within the block is meant to lose no more than that again.
"""

import math

import pytest
import torch
from torch import Tensor

from tests.support import lanes
from tests.support.hash_tables import Tables
from torchembed.ops.hash_table import BLOCK_SLOTS, Counter, Policy, TableShape, table_shape

CAPACITY = 2**17
BLOCK_LOSS = 1 / math.sqrt(2 * math.pi * BLOCK_SLOTS)
BATCH = 1024


@pytest.fixture(autouse=True)
def fast_kernels(device: torch.device, fastest_algorithms: None) -> None:
    if lanes.is_interpreted() or lanes.picked_kernel("insert_keys", device) == "reference":
        pytest.skip("millions of keys need compiled kernels")


def full_table(policy: Policy, device: torch.device) -> Tables:
    shape = table_shape(CAPACITY)
    assert shape == TableShape(32, 32, 128)
    return Tables([shape], policy, device)


def share_of(tables: Tables, best: Tensor) -> float:
    """Share of the ``best`` keys that the table holds."""
    found = [tables.find(part) >= 0 for part in best.split(2**14)]
    return float(torch.cat(found).double().mean())


@pytest.mark.parametrize(("policy", "num_refills"), [(Policy.CALLER, 12), (Policy.LRU, 2)])
def test_keeps_the_newest(policy: Policy, num_refills: int, device: torch.device) -> None:
    """Sequential keys whose scores grow with them, several times the capacity after it is full."""
    tables = full_table(policy, device)
    worst = 1.0
    for refill in range(1 + num_refills):
        keys = torch.arange(refill * CAPACITY, (refill + 1) * CAPACITY, device=device)
        for part in keys.split(BATCH):
            tables.train(part, scores=part if policy is Policy.CALLER else None)
        if refill > 0:
            worst = min(worst, share_of(tables, keys))
    assert worst >= max(0.975, 1 - 2 * BLOCK_LOSS), f"kept {worst:.4f}"
    assert tables.count(Counter.SIZE) == CAPACITY and tables.count(Counter.REFUSED) == 0


def test_keeps_the_best_scores(device: torch.device) -> None:
    """Five times as many keys as slots, with random scores."""
    tables = full_table(Policy.CALLER, device)
    num_keys = 5 * CAPACITY
    generator = torch.Generator().manual_seed(0)
    scores = torch.randperm(num_keys, generator=generator).to(device)
    keys = torch.arange(num_keys, device=device)
    for part, of_part in zip(keys.split(BATCH), scores.split(BATCH), strict=True):
        tables.train(part, scores=of_part)
    kept = share_of(tables, keys[scores >= num_keys - CAPACITY])
    assert kept >= max(0.99, 1 - 2 * BLOCK_LOSS), f"kept {kept:.4f}"


def test_fills_before_it_evicts(device: torch.device) -> None:
    """Nine tenths full, a table has evicted nothing: the 4096 slots of a block are 6.7 standard
    deviations above the mean number of its keys, 3686, and each key takes the emptier bucket."""
    tables = full_table(Policy.LRU, device)
    num_keys = CAPACITY * 9 // 10
    for part in torch.arange(num_keys, device=device).split(BATCH):
        tables.train(part)
    assert tables.count(Counter.EVICTED_FULL) == tables.count(Counter.REFUSED) == 0
    assert tables.count(Counter.SIZE) == num_keys
