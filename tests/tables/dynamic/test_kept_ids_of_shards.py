"""The ids that full tables keep where a hash divides them over ranks, beside those of one table."""

import collections
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.lanes import picked_kernel
from torchembed import LFU, LRU, Dynamic
from torchembed.sharding.planning.partition import HashPartition
from torchembed.tables import Admission, HashIndex, IndexedTable
from torchembed.tables.dynamic.policies import Eviction

CAPACITY, NUM_BATCHES, BATCH_SIZE = 8192, 48, 2048
NUM_SIGMA = 4

pytestmark = pytest.mark.skipif(
    picked_kernel("insert_keys", "cpu") != "native",
    reason="other kernels leave the same bits, and take minutes for so many ids",
)


def uniform(generator: np.random.Generator) -> np.ndarray:
    return generator.integers(0, 4 * CAPACITY, (NUM_BATCHES, BATCH_SIZE))


def zipf(generator: np.random.Generator) -> np.ndarray:
    """Ranks of a law of exponent 1.05 among many times as many ids as there are rows."""
    weights = np.arange(1, 16 * CAPACITY + 1) ** -1.05
    return generator.choice(len(weights), (NUM_BATCHES, BATCH_SIZE), p=weights / weights.sum())


def kept(stream: np.ndarray, eviction: Eviction, num_shards: int) -> set[int]:
    """The ids that ``num_shards`` tables of a share of the capacity hold after ``stream``."""
    rows, found = CAPACITY // num_shards, set[int]()
    partition = HashPartition(ranks=tuple(range(num_shards)))
    indices = [
        HashIndex([IndexedTable(0, 0, rows, 0)], Dynamic(eviction=eviction), torch.device("cpu"))
        for _ in range(num_shards)
    ]
    for batch in torch.from_numpy(stream):
        places = partition.places_of(batch)
        for place, index in enumerate(indices):
            ids = batch[places == place]
            index.insert(ids, torch.zeros(len(ids), dtype=torch.int32), Admission())
            index.release_forwards()
    for index in indices:
        tables = index.hash_tables
        found.update(tables.keys[tables.digests > 0].tolist())
    return found


def best(stream: np.ndarray, eviction: Eviction) -> set[int]:
    """The ids that a table without buckets would keep: the newest, or the most frequent ones."""
    newest = list(dict.fromkeys(stream.flatten()[::-1].tolist()))
    if isinstance(eviction, LFU):
        counts = collections.Counter(stream.flatten().tolist())
        newest.sort(key=lambda i: -counts[i])
    return set(newest[:CAPACITY])


def excess(ids: set[int], num_shards: int) -> float:
    """The part of ``ids``, as many as the capacity, beyond the shares of the shards."""
    places = HashPartition(ranks=tuple(range(num_shards))).places_of(torch.tensor(list(ids)))
    counts = torch.bincount(places, minlength=num_shards)
    return float((counts - CAPACITY // num_shards).clamp_min(0).sum()) / CAPACITY


@pytest.mark.parametrize("eviction", [LRU(), LFU()], ids=["LRU", "LFU"])
@pytest.mark.parametrize("draw", [uniform, zipf])
def test_shards_keep_what_one_table_keeps(
    draw: Callable[[np.random.Generator], np.ndarray], eviction: Eviction
) -> None:
    """Shards hold as many of the ids that a table without buckets keeps as one table does,
    less those beyond a shard's share of the rows, whatever the law of the stream."""
    stream = draw(np.random.default_rng(0))
    wanted, of_one = best(stream, eviction), kept(stream, eviction, 1)
    part = len(of_one & wanted) / CAPACITY
    for num_shards in (2, 4, 8):
        of_shards = kept(stream, eviction, num_shards)
        found = len(of_shards & wanted) / CAPACITY
        assert len(of_shards) == len(of_one) == CAPACITY
        # As if each of these ids were held by chance: a binomial number of them.
        sigma = np.sqrt(max(part * (1 - part), 1 / CAPACITY) / CAPACITY)
        assert found >= part - excess(wanted, num_shards) - NUM_SIGMA * sigma
