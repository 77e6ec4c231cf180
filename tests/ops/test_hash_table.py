"""Finding, touching and inserting keys of hash tables, against what Python says."""

import pytest
import torch

from tests.support.hash_tables import (
    EXTREME_KEYS,
    Tables,
    assert_counters_add_up,
    copy_of,
    int64,
)
from tests.support.tolerance import assert_same_bits
from tests.support.tracing import compiled_once
from tests.support.values import not_contiguous
from torchembed.ops.hash_table import (
    Counter,
    HashTables,
    Policy,
    TableShape,
    find_slots,
    hash_keys,
    insert_keys,
    locate_keys,
    table_shape,
)

ONE_BUCKET = TableShape(1, 1, 4)
SMALL = TableShape(2, 3, 4)
SCORED = [policy for policy in Policy if policy is not Policy.LRU]


def in_order(keys: list[int]) -> list[int]:
    """``keys`` in the order in which a table of one block takes them."""
    hashes = [number % 2**64 for number in hash_keys(int64(*keys)).tolist()]
    return [key for _, key in sorted(zip(hashes, keys, strict=True))]


def test_places_follow_from_the_hash(device: torch.device) -> None:
    """The hash that the kernels compute, in Python's integers."""
    geometry = torch.tensor([[0, 1, 1, 4], [4, 5, 32, 128], [20484, 2**20 - 3, 7, 100]])
    keys = torch.tensor([*EXTREME_KEYS, *range(40)])
    for table, (first, num_blocks, num_buckets, num_slots) in enumerate(geometry.tolist()):
        tables = torch.full(keys.shape, table, dtype=torch.int32)
        places = locate_keys(keys.to(device), tables.to(device), geometry.to(device))
        for position, key in enumerate(keys.tolist()):
            value = (key + 1) * 0x9E3779B97F4A7C15 % 2**64
            value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
            value ^= value >> 31
            block = value * num_blocks >> 64
            bucket = (value & 0xFFFF) * num_buckets >> 16
            step = 1 + ((value >> 16 & 0xFF) * (num_buckets - 1) >> 8)
            second = (bucket + step) % num_buckets if num_buckets > 1 else bucket
            buckets = [first + (block * num_buckets + b) * num_slots for b in (bucket, second)]
            assert int(places.hashes[position]) % 2**64 == value
            assert int(places.blocks[position]) == block
            assert places.buckets[position].tolist() == buckets
            assert int(places.digests[position]) == 1 + ((value >> 24 & 0xFF) * 255 >> 8)
            assert int(places.num_slots[position]) == num_slots
            assert (bucket != second) == (num_buckets > 1)


def test_every_key_is_legal(device: torch.device) -> None:
    tables = Tables([table_shape(50)], device=device)
    assert tables.find(EXTREME_KEYS).tolist() == [-1] * len(EXTREME_KEYS)
    result = tables.train(EXTREME_KEYS)
    assert sorted(tables.held()) == sorted(EXTREME_KEYS)
    assert result.slots.tolist() == tables.find(EXTREME_KEYS).tolist()
    assert int(result.num_new) == len(EXTREME_KEYS)
    assert sorted(result.keys.tolist()) == sorted(EXTREME_KEYS)
    assert result.slots.tolist() == [tables.held()[key] for key in EXTREME_KEYS]


def test_the_same_key_in_two_tables(device: torch.device) -> None:
    tables = Tables([ONE_BUCKET, SMALL], device=device)
    slots = tables.train([0, 0, 0, 3], [0, 1, -1, 1]).slots.tolist()
    assert slots[:3] == [0, tables.held(1)[0], -1] and slots[1] >= 4
    assert tables.find([0, 3, 3], [1, 1, 0]).tolist() == [slots[1], slots[3], -1]


def test_duplicates_are_one_key(device: torch.device) -> None:
    tables = Tables([ONE_BUCKET], device=device)
    result = tables.train([8, 8, 3, 8])
    first, second = in_order([3, 8])
    assert result.keys.tolist() == [first, second, 0, 0]
    assert result.tables.tolist() == [0, 0, -1, -1]
    assert result.new_slots.tolist() == [0, 1, -1, -1]
    assert result.slots.tolist() == [tables.held()[key] for key in (8, 8, 3, 8)]
    assert (tables.count(Counter.MISSES), tables.count(Counter.INSERTED)) == (4, 2)
    tables.train([8, 8, 4])
    assert (tables.count(Counter.HITS), tables.count(Counter.MISSES)) == (2, 5)


def test_more_new_keys_than_slots_are_refused(device: torch.device) -> None:
    """Rows of one batch do not evict each other."""
    tables = Tables([ONE_BUCKET], device=device)
    keys = list(range(10))
    result = tables.train(keys)
    taken = in_order(keys)[:4]
    assert sorted(tables.held()) == sorted(taken)
    assert [slot >= 0 for slot in result.slots.tolist()] == [key in taken for key in keys]
    assert result.keys.tolist() == taken + [0] * 6
    assert tables.count(Counter.REFUSED) == 6
    assert not result.is_evicted.any()
    assert_counters_add_up(tables.tables)


def test_rows_in_use_are_never_victims(device: torch.device) -> None:
    tables = Tables([ONE_BUCKET], device=device)
    tables.train([1, 2])  # epoch 1
    tables.train([3, 4])  # epoch 2
    result = tables.train([5, 6, 7], released=1)
    evicting = in_order([5, 6, 7])[:2]
    assert sorted(tables.held()) == sorted([3, 4, *evicting])
    assert sorted(result.evicted_keys[:2].tolist()) == [1, 2]
    assert result.is_evicted.tolist() == [True, True, False]
    assert result.evicted_touched.tolist() == result.evicted_scores.tolist() == [1, 1, 0]
    assert tables.count(Counter.REFUSED) == 1
    assert tables.count(Counter.EVICTED_AGE) == 4


def test_rows_that_this_batch_touches_are_never_victims(device: torch.device) -> None:
    tables = Tables([ONE_BUCKET], device=device)
    tables.train([1, 2, 3, 4])
    tables.train([1, 2, 3, 10, 11])
    assert sorted(tables.held()) == sorted([1, 2, 3, in_order([10, 11])[0]])


def test_the_longest_unused_goes_first(device: torch.device) -> None:
    tables = Tables([ONE_BUCKET], device=device)
    for keys in ([1], [2], [3], [4], [1], [5]):
        tables.train(keys)
    assert sorted(tables.held()) == [1, 3, 4, 5]
    result = tables.train([6])
    assert result.evicted_keys.tolist() == [3] and result.evicted_touched.tolist() == [3]


def test_the_least_frequent_goes_first(device: torch.device) -> None:
    tables = Tables([ONE_BUCKET], Policy.LFU, device)
    tables.train([4] * 10 + [5, 7, 7, 8, 8])
    result = tables.train([6] * 3 + [4])
    assert sorted(tables.held()) == [4, 6, 7, 8]
    assert result.evicted_keys[:1].tolist() == [5] and result.evicted_scores[:1].tolist() == [1]
    scores = tables.tables.scores
    assert scores is not None
    assert {key: int(scores[slot]) for key, slot in tables.held().items()} == {
        4: 11,
        6: 3,
        7: 2,
        8: 2,
    }


def test_a_key_colder_than_all_is_refused(device: torch.device) -> None:
    tables = Tables([ONE_BUCKET], Policy.LFU, device)
    tables.train([1, 1, 2, 2, 3, 3, 4, 4])
    result = tables.train([5])
    assert result.slots.tolist() == [-1] and tables.count(Counter.REFUSED) == 1
    assert int(result.num_new) == 0
    tables.train([5, 5])
    assert 5 in tables.held()


def test_scores_of_epochs_and_counts(device: torch.device) -> None:
    tables = Tables([ONE_BUCKET], Policy.EPOCH_LFU, device)
    tables.train([1, 1, 1, 2], epoch_number=3)
    tables.train([1, 2], epoch_number=3)
    tables.train([2], epoch_number=4)
    scores = tables.tables.scores
    assert scores is not None
    held = tables.held()
    assert int(scores[held[1]]) == 3 << 32 | 4
    assert int(scores[held[2]]) == 4 << 32 | 3
    scores[held[1]] = 3 << 32 | 2**32 - 2
    tables.train([1, 1, 1], epoch_number=5)
    assert int(scores[held[1]]) == 5 << 32 | 2**32 - 1


def test_scores_of_the_caller(device: torch.device) -> None:
    tables = Tables([ONE_BUCKET], Policy.CALLER, device)
    tables.train([1, 2, 1, 3, 4], scores=[5, -7, 9, 20, 30])
    scores = tables.tables.scores
    assert scores is not None
    held = tables.held()
    assert [int(scores[held[key]]) for key in (1, 2, 3, 4)] == [9, -7, 20, 30]
    tables.train([1, 1], scores=[-3, -4])  # a smaller one replaces it too
    assert int(scores[held[1]]) == -3
    assert tables.train([5], scores=[-8]).slots.tolist() == [-1]
    assert tables.train([5], scores=[-7]).evicted_keys.tolist() == [2]


@pytest.mark.parametrize("policy", list(Policy))
def test_batches_that_are_not_trained_change_nothing(policy: Policy, device: torch.device) -> None:
    tables = Tables([SMALL, ONE_BUCKET], policy, device)
    scores = [1, 2, 3, 4] if policy is Policy.CALLER else None
    tables.train([1, 2, 3, 4], [0, 0, 1, 1], scores=scores)
    before = copy_of(tables.tables)
    result = tables.train([1, 2, 3, 9], [0, 1, 1, 1], scores=scores, is_trained=False)
    for tensor, expected in zip(tables.tables, before, strict=True):
        if tensor is not None and expected is not None:
            assert_same_bits(tensor, expected)
    assert int(result.num_new) == 0
    assert result.slots.tolist() == tables.find([1, 2, 3, 9], [0, 1, 1, 1]).tolist()
    tables.train([9], scores=scores and scores[:1], is_trained=True)
    assert 9 in tables.held()


def test_positions_that_are_not_wanted_stay(device: torch.device) -> None:
    tables = Tables([SMALL], Policy.LFU, device)
    result = tables.train([1, 2, 1], wanted=[False, True, False])
    assert list(tables.held()) == [2]
    assert [slot >= 0 for slot in result.slots.tolist()] == [False, True, False]


def test_the_emptier_bucket_takes_a_new_key(device: torch.device) -> None:
    tables = Tables([TableShape(1, 4, 2)], device=device)
    keys = torch.arange(400, device=device)
    places = locate_keys(keys, tables.numbers(keys, 0), tables.tables.geometry)
    first, second = places.buckets[0].tolist()
    crowd = keys[(places.buckets == places.buckets[0]).all(1)].tolist()[:5]
    slots = tables.train(crowd).slots.tolist()
    by_key = dict(zip(crowd, slots, strict=True))
    expected = [first, second, first + 1, second + 1, -1]
    assert [by_key[key] for key in in_order(crowd)] == expected
    result = tables.train(in_order(crowd)[4:])
    assert result.slots.tolist() == [first] and result.evicted_keys.tolist() == in_order(crowd)[:1]


def test_empty_batches_and_tables_without_slots(device: torch.device) -> None:
    tables = Tables([TableShape(0, 0, 0), ONE_BUCKET], device=device)
    assert tables.train([]).slots.tolist() == []
    assert tables.train([1, 1], [0, 1]).slots.tolist() == [-1, 0]
    assert tables.count(Counter.REFUSED) == 1
    for shapes in ([], [TableShape(0, 0, 0)]):
        nothing = Tables(shapes, device=device)
        assert nothing.find([3, 4], -1).tolist() == [-1, -1]
        assert nothing.train([3, 4], -1).slots.tolist() == [-1, -1]


def test_integers_of_other_dtypes(device: torch.device) -> None:
    tables = Tables([SMALL], device=device)
    tables.train([-1, 5, 2**32 - 2])
    held = tables.held()
    narrow = tables.find(torch.tensor([-1, 5], dtype=torch.int32))
    assert narrow.tolist() == [held[-1], held[5]]
    unsigned = tables.find(torch.tensor([2**32 - 2, 5], dtype=torch.uint32))
    assert unsigned.tolist() == [held[2**32 - 2], held[5]]
    assert tables.find(torch.tensor([2**64 - 1], dtype=torch.uint64)).tolist() == [held[-1]]


def test_ids_need_not_be_contiguous(device: torch.device) -> None:
    tables = Tables([SMALL], device=device)
    keys = not_contiguous(torch.tensor([5, 2, 8, 5], device=device))
    assert tables.train(keys).slots.tolist() == tables.find(keys).tolist()


def test_worked_example(device: torch.device) -> None:
    tables = Tables([TableShape(1, 1, 2)], device=device)
    tables.train([5])
    result = tables.train([7, 5, 7, 9], released=0)
    assert result.slots.tolist() == [1, 0, 1, -1] and result.num_new.tolist() == [1]

    other = Tables([TableShape(1, 1, 2)], device=device)
    other.train([5])
    result = other.train([7, 7, 9], released=1)
    assert result.slots.tolist() == [1, 1, 0] and result.evicted_keys.tolist() == [0, 5, 0]


@pytest.mark.parametrize(
    ("capacity", "initial", "shape"),
    [
        (4, None, TableShape(1, 1, 4)),
        (128, None, TableShape(1, 1, 128)),
        (129, None, TableShape(1, 2, 65)),
        (4096, None, TableShape(1, 32, 128)),
        (4097, None, TableShape(2, 17, 121)),
        (2**20, None, TableShape(256, 32, 128)),
        (2**20, 1, TableShape(1, 32, 128)),
        (2**20, 5000, TableShape(2, 32, 128)),
        (9 * 4096, 1, TableShape(1, 18, 128)),
    ],
)
def test_shapes_of_capacities(capacity: int, initial: int | None, shape: TableShape) -> None:
    assert table_shape(capacity, initial) == shape
    num_rows = shape.num_rows
    while num_rows < capacity:
        num_rows *= 2
    assert capacity <= num_rows <= capacity * 1.02 + 128


def test_capacities_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"^capacity must be at least 1 row, got 0$"):
        table_shape(0)
    with pytest.raises(ValueError, match=r"^initial_capacity must be in \[1, 5\], the capacity, g"):
        table_shape(5, 6)


@pytest.mark.parametrize("policy", list(Policy))
def test_opcheck(policy: Policy, device: torch.device) -> None:
    tables = Tables([SMALL, ONE_BUCKET], policy, device)
    keys = torch.tensor([1, 2, 3, 9, 2], device=device)
    numbers = torch.tensor([0, 1, 0, -1, 1], dtype=torch.int32, device=device)
    scores = keys if policy is Policy.CALLER else None
    tables.train(keys[:2], [0, 1], scores=None if scores is None else scores[:2])
    held = tables.tables
    ops = torch.ops.torchembed
    torch.library.opcheck(
        ops.find_slots.default, (keys, numbers, held.digests, held.keys, held.geometry)
    )
    slots = tables.find(keys, numbers.tolist())
    epoch, released = int64(3, device=device), int64(2, device=device)
    number = epoch if policy is Policy.EPOCH_LFU else None
    use, state = (int(policy), epoch, number), (held.touched, held.scores)
    torch.library.opcheck(
        ops.touch_slots.default, (slots, numbers, *use, scores, None, *state, held.counters)
    )
    batch = (keys, numbers, slots, None, *use, released, scores, None)
    state = (held.digests, held.keys, *state, held.geometry, held.counters)
    torch.library.opcheck(ops.insert_keys.default, (*batch, *state))
    torch.library.opcheck(ops.erase_keys.default, (keys, numbers, released, *state))


def test_compiles_whole_and_once_for_every_size(device: torch.device) -> None:
    tables = Tables([SMALL], device=device)

    def admitted(held: HashTables, keys: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        slots = find_slots(held, keys, numbers)
        epoch, released = int64(9, device=device), int64(8, device=device)
        result = insert_keys(
            held, keys, numbers, slots, policy=Policy.LRU, epoch=epoch, released=released
        )
        return result.slots + 1

    compiled = compiled_once(admitted)
    for num_ids in (3, 4, 9):
        keys = torch.arange(num_ids, device=device)
        numbers = tables.numbers(keys, 0)
        expected = admitted(copy_of(tables.tables), keys, numbers)
        assert torch.equal(compiled(tables.tables, keys, numbers), expected)
