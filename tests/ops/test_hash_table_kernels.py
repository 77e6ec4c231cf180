"""Kernels of hash tables against the references, bit for bit, over sequences of batches."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support import lanes
from tests.support.hash_tables import (
    EXTREME_KEYS,
    assert_counters_add_up,
    assert_equal_tables,
    copy_of,
    int64,
)
from tests.support.repeats import assert_repeats
from tests.support.sizes import Sizes
from tests.support.tolerance import assert_same_bits
from torchembed.core.hash_tables import KeyErasure, KeyInsertion, SlotTouch
from torchembed.core.random_bits import GOLDEN, MIX_FIRST, MIX_SECOND, signed64
from torchembed.ops.hash_table import (
    Counter,
    HashTables,
    Policy,
    TableShape,
    empty_hash_tables,
    hash_keys,
    table_shape,
)
from torchembed.ops.hash_table.reference import (
    erase_keys_reference,
    find_slots_reference,
    insert_keys_reference,
    touch_slots_reference,
)

Operation = Callable[..., Any]
OPS = torch.ops.torchembed
KERNELS: tuple[Operation, Operation, Operation, Operation] = (
    OPS.find_slots,
    OPS.touch_slots,
    OPS.insert_keys,
    OPS.erase_keys,
)
REFERENCES: tuple[Operation, Operation, Operation, Operation] = (
    find_slots_reference,
    lambda *arguments: touch_slots_reference(SlotTouch(*arguments)),
    lambda *arguments: insert_keys_reference(KeyInsertion(*arguments)),
    lambda *arguments: erase_keys_reference(KeyErasure(*arguments)),
)


@dataclasses.dataclass(frozen=True)
class Batch:
    keys: Tensor
    tables: Tensor
    scores: Tensor
    wanted: Tensor | None
    is_trained: Tensor | None
    epoch: int
    released: int
    epoch_number: int
    erased: Tensor = dataclasses.field(default_factory=int64)
    """Keys that are erased from the tables of the batch's first keys."""


def admit(
    operations: tuple[Operation, Operation, Operation, Operation],
    held: HashTables,
    policy: Policy,
    batch: Batch,
) -> list[Tensor]:
    """Find, touch and insert a batch, then erase some of its keys: the slots found, what insertion
    gives, and the slots erased."""
    find, touch, insert, erase = operations
    device = held.digests.device
    keys, tables = batch.keys.to(device), batch.tables.to(device)
    epoch = int64(batch.epoch, device=device)
    number = int64(batch.epoch_number, device=device) if policy is Policy.EPOCH_LFU else None
    scores = batch.scores.to(device) if policy is Policy.CALLER else None
    wanted = None if batch.wanted is None else batch.wanted.to(device)
    trained = None if batch.is_trained is None else batch.is_trained.to(device)
    slots = find(keys, tables, held.digests, held.keys, held.geometry)
    uses = (held.touched, held.scores)
    touch(slots, tables, int(policy), epoch, number, scores, trained, *uses, held.counters)
    released = int64(batch.released, device=device)
    scoring = (int(policy), epoch, number, released, scores, trained)
    state = (held.digests, held.keys, *uses, held.geometry, held.counters)
    inserted = insert(keys, tables, slots, wanted, *scoring, *state)
    erased = erase(batch.erased.to(device), tables[: batch.erased.numel()], released, *state)
    return [slots, *inserted, erased]


def assert_lane_equals_reference(
    shapes: list[TableShape], policy: Policy, batches: Iterable[Batch], device: torch.device
) -> HashTables:
    """Both see the same batches; everything that they give and leave behind is equal."""
    expected = empty_hash_tables(shapes, policy)
    tables = empty_hash_tables(shapes, policy, device)
    for batch in batches:
        wanted = admit(REFERENCES, expected, policy, batch)
        for result, other in zip(admit(KERNELS, tables, policy, batch), wanted, strict=True):
            assert_same_bits(result.cpu(), other)
        assert_equal_tables(copy_of(tables, "cpu"), expected)
    assert_counters_add_up(expected)
    return expected


SHAPES = st.sampled_from(
    [
        TableShape(1, 1, 3),
        TableShape(1, 2, 2),
        TableShape(3, 3, 2),
        TableShape(2, 1, 128),
        TableShape(0, 0, 0),
        table_shape(100),
    ]
)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[TableShape], list[Batch]]:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=3))
    key = st.one_of(st.integers(0, 40), st.sampled_from(EXTREME_KEYS))
    batches, released, epoch_number = [], 0, 0
    for epoch in range(1, draw(st.integers(1, 8)) + 1):
        keys = draw(st.lists(key, max_size=20))
        table = st.integers(-1, len(shapes) - 1)
        tables = draw(st.lists(table, min_size=len(keys), max_size=len(keys)))
        score = st.one_of(st.integers(-3, 3), st.sampled_from([-(2**63), 2**63 - 1]))
        scores = draw(st.lists(score, min_size=len(keys), max_size=len(keys)))
        wanted = None
        if draw(st.booleans()):
            odd = draw(st.booleans())
            wanted = torch.tensor([key % 2 == odd for key in keys], dtype=torch.bool)
        released = draw(st.integers(released, epoch - 1))
        epoch_number += draw(st.integers(0, 1))
        batches.append(
            Batch(
                torch.tensor(keys, dtype=torch.int64),
                torch.tensor(tables, dtype=torch.int32),
                torch.tensor(scores, dtype=torch.int64),
                wanted,
                draw(st.sampled_from([None, torch.tensor([True]), torch.tensor([False])])),
                epoch,
                released,
                epoch_number,
                torch.tensor(keys[::-1][: draw(st.integers(0, 6))], dtype=torch.int64),
            )
        )
    return shapes, batches


@pytest.mark.parametrize("policy", list(Policy))
def test_equals_the_reference(policy: Policy, device: torch.device, sizes: Sizes) -> None:
    @settings(max_examples=sizes.num_examples, derandomize=True, database=None)
    @given(sequences())
    def run(drawn: tuple[list[TableShape], list[Batch]]) -> None:
        shapes, batches = drawn
        assert_lane_equals_reference(shapes, policy, batches, device)

    run()


def random_batches(num_batches: int, num_ids: int, num_keys: int, seed: int) -> Iterable[Batch]:
    """Skewed ids of two tables; a batch of them is under way while the next is admitted."""
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(1, num_batches + 1):
        uniform = torch.rand(num_ids, generator=generator, dtype=torch.float64)
        keys = (num_keys**uniform).long() * 0x9E3779B97F4A7C1
        yield Batch(
            keys,
            torch.randint(-1, 2, (num_ids,), generator=generator, dtype=torch.int32),
            torch.randint(-50, 50 + epoch, (num_ids,), generator=generator),
            None,
            None,
            epoch,
            max(epoch - 2, 0),
            epoch // 7,
            keys[::9].flip(0),
        )


@pytest.mark.parametrize("policy", list(Policy))
def test_equals_the_reference_over_many_batches(policy: Policy, device: torch.device) -> None:
    """Tables of several blocks that are full most of the time."""
    if lanes.is_interpreted():
        shapes, batches = [TableShape(2, 2, 8), TableShape(1, 1, 5)], random_batches(5, 60, 400, 0)
    else:
        shapes = [TableShape(3, 4, 16), TableShape(2, 5, 7)]
        batches = random_batches(60, 250, 6000, seed=0)
    tables = assert_lane_equals_reference(shapes, policy, batches, device)
    evicted = tables.counters[:, Counter.EVICTED_FULL]
    assert (evicted > 0).all()


@pytest.mark.parametrize("policy", list(Policy))
def test_repeats_its_bits(
    policy: Policy, device: torch.device, sizes: Sizes, fastest_algorithms: None
) -> None:
    """With any number of threads: each part of a batch that a thread takes is small enough."""
    shapes = [TableShape(9, 4, 16), TableShape(1, 2, 128)]
    num_ids = sizes.num_parallel_ids // 5

    def run() -> Iterable[Tensor]:
        held = empty_hash_tables(shapes, policy, device)
        results = []
        for batch in random_batches(3, num_ids, num_ids, seed=1):
            results += admit(KERNELS, held, policy, batch)
        return [*results, *(part for part in held if part is not None)]

    if lanes.picked_kernel("insert_keys", device) == "reference":
        num_ids = 500
    assert_repeats(run)


def batch_of(keys: list[int], tables: list[int], epoch: int) -> Batch:
    """A batch that is trained, all batches before which are released."""
    numbers, zeros = torch.tensor(tables, dtype=torch.int32), torch.zeros(len(keys)).long()
    nothing = zeros[:0]
    return Batch(torch.tensor(keys), numbers, zeros, None, None, epoch, epoch - 1, epoch, nothing)


@pytest.mark.parametrize("policy", list(Policy))
def test_positions_of_several_blocks_of_programs(policy: Policy, device: torch.device) -> None:
    shapes = [TableShape(4, 2, 3), TableShape(2, 4, 128)]
    assert_lane_equals_reference(shapes, policy, random_batches(2, 1030, 20, seed=3), device)


def test_counts_of_epochs_end_at_the_greatest(device: torch.device) -> None:
    shapes, greatest = [TableShape(1, 1, 8)], 2**32 - 1
    first = batch_of([1, 2, 3, 4, 5], [0] * 5, 1)
    second = batch_of([1, 2, 2, 3, 3, 4, 4, 5, 2] * 3, [0] * 27, 2)
    counts = [greatest, greatest - 1, greatest - 2, greatest - 3, 7 << 32 | greatest]
    results = []
    for operations, where in ((KERNELS, device), (REFERENCES, torch.device("cpu"))):
        held = empty_hash_tables(shapes, Policy.EPOCH_LFU, where)
        admit(operations, held, Policy.EPOCH_LFU, first)
        assert held.scores is not None
        held.scores[:5] = torch.tensor(counts, device=where)
        admit(operations, held, Policy.EPOCH_LFU, second)
        assert held.scores[:5].tolist() == [2 << 32 | greatest] * 5
        results.append(copy_of(held, "cpu"))
    assert_equal_tables(*results)


def key_of_hash(value: int) -> int:
    """The key whose hash is the unsigned ``value``."""

    def unshifted(number: int, bits: int) -> int:
        result = number
        for _ in range(64 // bits):
            result = number ^ result >> bits
        return result

    for bits, factor in ((31, MIX_SECOND), (27, MIX_FIRST), (30, GOLDEN)):
        value = unshifted(value, bits) * pow(factor, -1, 1 << 64) % (1 << 64)
    return signed64(value - 1)


def test_positions_without_a_key_come_behind_the_greatest_hash(device: torch.device) -> None:
    key = key_of_hash(2**64 - 1)
    assert int(hash_keys(int64(key))) == -1
    batch = batch_of([3, key, 5, key, 6], [0, 0, -1, 0, -1], 1)
    assert_lane_equals_reference([TableShape(1, 1, 8)], Policy.LRU, [batch], device)


def test_does_not_change_what_it_reads(device: torch.device) -> None:
    shapes = [TableShape(2, 2, 4), TableShape(1, 1, 5)]
    held = empty_hash_tables(shapes, Policy.LFU, device)
    (batch,) = random_batches(1, 30, 50, seed=2)
    admit(KERNELS, held, Policy.LFU, batch)
    before = copy_of(held)
    keys, tables = batch.keys.to(device), batch.tables.to(device)
    slots = OPS.find_slots(keys, tables, held.digests, held.keys, held.geometry)
    assert (slots >= 0).any()
    assert_equal_tables(held, before)
