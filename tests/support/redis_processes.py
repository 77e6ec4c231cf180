"""What processes do with a Redis that they share, until they are told to end or are killed."""

from multiprocessing.connection import Connection

import numpy as np
import torch

from tests.support.partition_keys import keys_of, lines_of
from torchembed.stores import OverflowPolicy, RedisOptions, RedisStore, VolatileOptions

NUM_PARTITIONS = 2
MARGIN, NUM_LEFT = 300, 150
LINE_BYTES = 64
NUM_KEYS = 100


def options(policy: OverflowPolicy) -> VolatileOptions:
    return VolatileOptions(
        num_partitions=NUM_PARTITIONS,
        overflow_margin_rows=MARGIN,
        overflow_policy=policy,
        overflow_resolution_target=0.5,
        max_batch_rows=64,
    )


def overflow_again_and_again(
    messages: Connection, address: str, policy: OverflowPolicy, seed: int
) -> None:
    """Read and write random rows of one partition, until a message comes."""
    keys = keys_of(0, 4 * MARGIN, NUM_PARTITIONS)
    random = np.random.default_rng(seed)
    num_calls = 0
    with RedisStore(RedisOptions(addresses=(address,)), options(policy)) as store:
        table = store.table("t", LINE_BYTES)
        messages.send("ready")
        while not messages.poll():
            some = keys[torch.from_numpy(random.choice(len(keys), 64, replace=False))]
            table.write(some, lines_of(some, LINE_BYTES).contiguous())
            lines = torch.empty(len(some), LINE_BYTES, dtype=torch.uint8)
            found = table.read(some, lines)
            assert torch.equal(lines[found], lines_of(some[found], LINE_BYTES))
            num_calls += 1
    messages.send(num_calls)


def write_versions_until_killed(messages: Connection, address: str, first: int) -> None:
    """Write all keys again and again, each time as another version, which is said before."""
    keys = torch.arange(NUM_KEYS)
    policy = options(OverflowPolicy.EVICT_OLDEST)
    with RedisStore(RedisOptions(addresses=(address,)), policy) as store:
        table = store.table("t", LINE_BYTES)
        for version in range(first, first + 1_000_000):
            messages.send(version)
            table.write(keys, torch.full((NUM_KEYS, LINE_BYTES), version % 256).to(torch.uint8))
