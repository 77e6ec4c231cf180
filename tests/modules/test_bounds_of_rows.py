"""Dynamic tables that evict by themselves while they hold more than a number of rows or bytes."""

import copy
from collections import Counter as Counts
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchembed
from torchembed import LFU, LRU, Dynamic, EmbeddingBag, HashedRows, MinimumCount, TableStatistics
from torchembed.tables import HashIndex, IndexedTable

CAPACITY = 100


class Trained:
    """A dynamic table and its optimizer."""

    def __init__(self, dynamic: Dynamic, capacity: int = CAPACITY, dim: int = 2) -> None:
        self.bag = EmbeddingBag(capacity, dim, mode="sum", seed=1, dynamic=dynamic)
        self.optimizer = torchembed.optim.Adagrad(self.bag.parameters(), lr=0.1)

    def step(self, ids: Sequence[int]) -> set[int]:
        """A step; the ids that the table holds then."""
        self.bag(torch.tensor([list(ids)], dtype=torch.int64)).square().sum().backward()
        self.optimizer.step()
        index = self.bag.table_set.tables[0].group.index
        assert isinstance(index, HashIndex)
        state = index.hash_tables
        return set(state.keys[state.digests > 0].tolist())

    @property
    def statistics(self) -> TableStatistics:
        return self.bag.statistics()["weight"]


@pytest.mark.parametrize("eviction", [LRU(), LFU()], ids=["lru", "lfu"])
@settings(max_examples=15)
@given(
    batches=st.lists(st.lists(st.integers(1, 40), max_size=9), min_size=3, max_size=12),
    max_rows=st.integers(1, 20),
    evict_to=st.sampled_from([0.25, 0.5, 1.0]),
)
def test_the_least_scores_go_down_to_the_target(
    eviction: LRU | LFU, batches: list[list[int]], max_rows: int, evict_to: float
) -> None:
    """Each step visits the table's one block; rows in use stay, and below the bound all do."""
    trained = Trained(Dynamic(eviction=eviction, max_rows=max_rows, evict_to=evict_to))
    last_use: dict[int, int] = {}
    counts: Counts[int] = Counts()
    num_gone = 0
    for step, ids in enumerate(batches):
        held = trained.step(ids)
        counts.update(ids)
        last_use.update(dict.fromkeys(ids, step))
        may_go = {id_ for id_, last in last_use.items() if last <= step - 2}
        num_going = 0
        if len(last_use) > max_rows:
            num_going = min(len(may_go), len(last_use) - int(max_rows * evict_to))
        gone = last_use.keys() - held
        assert held <= last_use.keys()
        assert len(gone) == num_going
        assert gone <= may_go

        def score(id_: int) -> tuple[int, int]:
            return (counts[id_] if eviction == LFU() else 0), last_use[id_]

        if gone and may_go - gone:
            assert max(map(score, gone)) <= min(map(score, may_go - gone))
        for id_ in gone:
            del last_use[id_], counts[id_]
        num_gone += len(gone)
    assert trained.statistics.evicted_target == num_gone
    assert trained.statistics.size == len(last_use)


@pytest.mark.parametrize("sweep_steps", [1, 2, 1000])
def test_larger_tables_stay_near_the_bound(sweep_steps: int) -> None:
    """Each step visits some of the table's three blocks."""
    max_rows, num_new, pass_steps = 5000, 300, min(sweep_steps, 3)
    trained = Trained(Dynamic(max_rows=max_rows, sweep_steps=sweep_steps), capacity=3 * 4096)
    sizes = [len(trained.step(range(num_new * step, num_new * (step + 1)))) for step in range(34)]
    assert sizes[:16] == [num_new * (step + 1) for step in range(16)]
    assert max(sizes) <= max_rows + num_new * pass_steps
    assert min(sizes[16:]) >= 0.9 * max_rows
    assert trained.statistics.evicted_full == 0


def test_a_run_goes_on_from_a_state_dict_as_if_it_had_not_stopped() -> None:
    dynamic = Dynamic(eviction=LFU(), admission=MinimumCount(2), max_rows=30, evict_to=0.5)
    batches = torch.randint(80, (24, 20), generator=torch.Generator().manual_seed(0)).tolist()
    first = Trained(dynamic)
    held = [first.step(ids) for ids in batches[:12]]
    assert first.statistics.evicted_target > 0
    second = Trained(dynamic)
    second.bag.load_state_dict(first.bag.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    held = [first.step(ids) for ids in batches[12:]]
    assert [second.step(ids) for ids in batches[12:]] == held
    assert torch.equal(first.bag.weight, second.bag.weight)
    assert first.statistics == second.statistics


def test_bytes_become_rows_once_the_optimizer_is_known() -> None:
    """A row has 3 float32, as many of Adagrad's state, and 17 bytes of its id and last use."""
    in_bytes = Trained(Dynamic(max_bytes=20 * (2 * 12 + 17), evict_to=0.5), dim=3)
    in_rows = Trained(Dynamic(max_rows=20, evict_to=0.5), dim=3)
    both = Trained(Dynamic(max_rows=20, max_bytes=10**6, evict_to=0.5), dim=3)
    one_less = Trained(Dynamic(max_bytes=20 * (2 * 12 + 17) - 1, evict_to=0.5), dim=3)
    batches = [range(2 * step, 2 * step + 2) for step in range(10)]
    for ids in [*batches, [], [], []]:
        expected = in_rows.step(ids)
        assert in_bytes.step(ids) == both.step(ids) == expected
        one_less.step(ids)
    assert in_rows.statistics.size == 20
    assert one_less.statistics.size == 9  # half of 19


def test_ids_that_go_are_deleted_in_deltas() -> None:
    trained = Trained(Dynamic(max_rows=8, evict_to=0.5, deletion_log=100))
    trained.step([0, 1, 2])
    trained.step([3, 4, 5])
    mark = trained.bag.delta().mark
    trained.step([6, 7, 8])
    held = trained.step([9, 10, 11])
    changes = trained.bag.delta(since=mark).tables["weight"]
    assert set(changes.deleted_ids.tolist()) == set(range(12)) - held != set()


def test_evaluation_evicts_nothing_and_growing_tables_keep_their_bound() -> None:
    dynamic = Dynamic(initial_capacity=1, max_rows=3800, missing=HashedRows(7), sweep_steps=1)
    trained = Trained(dynamic, capacity=3 * 4096)
    held = [trained.step(range(400 * step, 400 * step + 400)) for step in range(16)]
    assert trained.bag.weight.shape[0] > 4096 + 7
    assert max(map(len, held)) <= 3800 + 400
    assert trained.statistics.evicted_target > 0
    trained.bag.eval()
    size = trained.statistics.size
    trained.bag(torch.arange(9000)[None])
    assert trained.statistics.size == size


def test_tables_of_the_meta_device_get_their_bound() -> None:
    with torch.device("meta"):
        trained = Trained(Dynamic(max_bytes=10 * (2 * 8 + 17)))
    trained.bag.to_empty(device="cpu")
    trained.bag.reset_parameters()
    for step in range(8):
        trained.step(range(2 * step, 2 * step + 2))
    assert trained.statistics.evicted_target > 0
    assert trained.statistics.size <= 10


def test_ranks_that_divide_a_table_divide_its_bound() -> None:
    table = IndexedTable(1, 0, 128, 0, num_shares=2)
    index = HashIndex([table], Dynamic(max_rows=9), torch.device("cpu"))
    assert index._bounds is not None
    assert index._bounds._limits.flatten().tolist() == [4, 3]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="max_rows must be at least 1, got 0"):
        Dynamic(max_rows=0)
    with pytest.raises(TypeError, match=r"max_bytes must be an int, got 1000000000\.0"):
        Dynamic(max_bytes=1e9)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"evict_to must be in \(0, 1\], a part of the bound, got 9"
    ):
        Dynamic(max_rows=10, evict_to=9)
    with pytest.raises(TypeError, match=r"evict_to must be a float, .* got None"):
        Dynamic(max_rows=10, evict_to=None)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"max_rows of table .* at most its capacity, .*=100, got 101"
    ):
        Trained(Dynamic(max_rows=101))
