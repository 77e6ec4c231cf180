"""How many rows an overflow leaves, and which."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.bounded_stores import BoundedStore
from tests.support.partition_keys import keys_of, lines_of
from torchembed.stores import OverflowPolicy, RowTable, VolatileOptions

NUM_PARTITIONS = 3
LINE_BYTES = 12

Open = Callable[[VolatileOptions], BoundedStore]


def bounded(policy: OverflowPolicy, margin: int, target: float, max_batch: int) -> VolatileOptions:
    return VolatileOptions(
        num_partitions=NUM_PARTITIONS,
        overflow_margin_rows=margin,
        overflow_policy=policy,
        overflow_resolution_target=target,
        max_batch_rows=max_batch,
    )


def write(table: RowTable, keys: Tensor) -> None:
    table.write(keys, lines_of(keys, LINE_BYTES).contiguous())


def read(table: RowTable, keys: Tensor) -> None:
    lines = torch.empty(len(keys), LINE_BYTES, dtype=torch.uint8)
    assert table.read(keys, lines).all()


def kept(table: RowTable) -> list[int]:
    """The keys of a table, whose lines must be their own."""
    chunks = list(table.chunks(100_000))
    for chunk in chunks:
        assert torch.equal(chunk.lines, lines_of(chunk.keys, LINE_BYTES))
    return [key for chunk in chunks for key in chunk.keys.tolist()]


@pytest.mark.parametrize("policy", OverflowPolicy)
@pytest.mark.parametrize(
    ("margin", "target", "max_batch", "num_left"),
    [
        (100, 0.8, 7, 80),
        (100, 0.8, 65_536, 80),
        # The product of the floating-point numbers is less than 29.
        (100, 0.29, 13, 29),
        (7, 0.5, 3, 3),
        (1, 0.8, 10, 0),
        (12_000, 0.9, 65_536, 10_800),
    ],
)
def test_an_overflow_leaves_exactly_its_share_of_that_partition_alone(
    open_bounded: Open,
    policy: OverflowPolicy,
    margin: int,
    target: float,
    max_batch: int,
    num_left: int,
) -> None:
    store = open_bounded(bounded(policy, margin, target, max_batch))
    table = store.table("t", LINE_BYTES)
    others = keys_of(1, margin, NUM_PARTITIONS)
    write(table, others)
    keys = keys_of(0, margin + 1, NUM_PARTITIONS)
    write(table, keys[:margin])
    # As many as the margin are not too many, though they are all read or written once more.
    write(table, keys[:margin])
    read(table, keys[:margin])
    assert table.num_rows() == 2 * margin
    assert store.num_evicted_rows == 0
    write(table, keys[margin:])
    left = set(kept(table))
    assert left >= set(others.tolist())
    assert left - set(others.tolist()) <= set(keys.tolist())
    assert len(left) == margin + num_left
    assert store.num_evicted_rows == margin + 1 - num_left


@pytest.mark.parametrize("policy", OverflowPolicy)
@pytest.mark.parametrize(("max_batch", "num_left"), [(1000, 32), (39, 32), (10, 34), (1, 40)])
def test_a_call_of_several_batches_overflows_after_each(
    open_bounded: Open, policy: OverflowPolicy, max_batch: int, num_left: int
) -> None:
    """112 rows of a partition of 40 at most, 32 after an overflow: in batches of 10 there are 40,
    50 that become 32, three times 42 that become 32, 40, 50 that become 32, and the last two."""
    table = open_bounded(bounded(policy, 40, 0.8, max_batch)).table("t", LINE_BYTES)
    write(table, keys_of(2, 112, NUM_PARTITIONS))
    assert len(kept(table)) == num_left


def test_the_oldest_go(open_bounded: Open) -> None:
    options = bounded(OverflowPolicy.EVICT_OLDEST, 10, 0.5, 100)
    store = open_bounded(options)
    table = store.table("t", LINE_BYTES)
    keys = keys_of(0, 11, NUM_PARTITIONS)
    for n in range(10):
        write(table, keys[n : n + 1])
    read(table, keys[:2])
    write(table, keys[2:3])
    store.sync()
    write(table, keys[10:])
    assert kept(table) == sorted(keys[[0, 1, 2, 9, 10]].tolist())


def test_the_least_used_go_and_the_others_stay_in_their_order(open_bounded: Open) -> None:
    options = bounded(OverflowPolicy.EVICT_LEAST_USED, 10, 0.5, 100)
    store = open_bounded(options)
    table = store.table("t", LINE_BYTES)
    keys = keys_of(0, 17, NUM_PARTITIONS)
    write(table, keys[:10])
    # Each as often as its place says, which writing it again does not change.
    read(table, keys[:10].repeat_interleave(torch.arange(10)))
    store.sync()
    write(table, keys[:10])
    write(table, keys[10:11])
    assert kept(table) == sorted(keys[5:10].tolist())
    write(table, keys[11:16])
    read(table, keys[11:14].repeat(8))
    store.sync()
    write(table, keys[16:])
    # Read 9, 8, 8, 8 and 8 times; one that came a moment ago was not read yet.
    assert kept(table) == sorted(keys[[8, 9, 11, 12, 13]].tolist())


def test_any_go_at_random(open_bounded: Open) -> None:
    options = bounded(OverflowPolicy.EVICT_RANDOM, 2000, 0.5, 1000)
    table = open_bounded(options).table("t", LINE_BYTES)
    keys = keys_of(0, 2001, NUM_PARTITIONS)
    write(table, keys)
    # A thousand of two thousand: the deviation of the number of the first half is 11.
    assert 400 < len(set(kept(table)) & set(keys[:1000].tolist())) < 600


@pytest.mark.parametrize("policy", [OverflowPolicy.EVICT_OLDEST, OverflowPolicy.EVICT_LEAST_USED])
def test_reading_chunks_is_no_use_of_rows(open_bounded: Open, policy: OverflowPolicy) -> None:
    store = open_bounded(bounded(policy, 10, 0.5, 100))
    table = store.table("t", LINE_BYTES)
    keys = keys_of(0, 12, NUM_PARTITIONS)
    write(table, keys[:2])
    write(table, keys[2:10])
    read(table, keys[2:10])
    kept(table)
    store.sync()
    write(table, keys[10:])
    assert not set(keys[:2].tolist()) & set(kept(table))
