"""Dynamic tables whose counts decay, and those that evict when they are told to."""

from collections import Counter as Counts

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchembed
from torchembed import (
    LFU,
    LRU,
    DecayingLFU,
    Dynamic,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    SparseFeatures,
)
from torchembed.ops.hash_table import Counter, HashTables
from torchembed.tables import HashIndex, SnapshotDueError


class Trained:
    """Two dynamic tables in one group, and their optimizer."""

    def __init__(self, dynamic: Dynamic, capacity: int) -> None:
        configs = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=capacity,
                embedding_dim=2,
                feature_names=(name,),
                dynamic=dynamic,
            )
            for name in "ab"
        ]
        self.module = EmbeddingBagCollection(configs)
        self.optimizer = torchembed.optim.SGD(self.module.parameters(), lr=0.1)

    def forward(self, a: list[int], b: list[int] | None = None) -> torch.Tensor:
        batch = SparseFeatures.from_dict({"a": [a], "b": [b or []]})
        return self.module(batch).values()

    def step(self, a: list[int], b: list[int] | None = None) -> None:
        self.forward(a, b).square().sum().backward()
        self.optimizer.step()

    @property
    def state(self) -> HashTables:
        (group,) = self.module.table_set.current_groups()
        assert isinstance(group.index, HashIndex)
        return group.index.hash_tables

    def scores(self, table: int = 0) -> dict[int, int]:
        """The score of each id that a table holds, ``touched`` under LRU."""
        state = self.state
        scores = state.touched if state.scores is None else state.scores
        parts = [tensor.chunk(2)[table] for tensor in (state.keys, scores, state.digests)]
        columns = zip(*(part.tolist() for part in parts), strict=True)
        return {key: score for key, score, digest in columns if digest}


@given(
    batches=st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=12),
    rate=st.sampled_from([0.0, 0.3, 0.5, 0.99]),
    steps_per_decay=st.integers(1, 4),
)
def test_counts_decay_every_so_many_steps(
    batches: list[list[int]], rate: float, steps_per_decay: int
) -> None:
    """Rounded down; a step's own occurrences count in full."""
    policy = DecayingLFU(rate=rate, steps_per_decay=steps_per_decay)
    trained = Trained(Dynamic(eviction=policy), 20)
    counts: Counts[int] = Counts()
    for step, ids in enumerate(batches, start=1):
        trained.step(ids, [7])
        if step % steps_per_decay == 0:
            counts = Counts({id_: int(count * rate) for id_, count in counts.items()})
        counts.update(ids)
        assert trained.scores() == counts


def test_each_row_of_a_large_table_decays_once_in_a_period() -> None:
    ids = list(range(9000))
    policy = DecayingLFU(rate=0.5, steps_per_decay=7)
    trained = Trained(Dynamic(eviction=policy), 3 * 4096)
    trained.step(ids * 8, [1])
    scores = []
    for _ in range(14):
        trained.step([-1])
        found = trained.scores()
        scores.append([found[id_] for id_ in ids])
    assert len(set(map(tuple, scores))) > 3
    assert set(scores[6]) == {4}
    assert set(scores[13]) == {2}


def test_gradients_of_several_forwards_decay_counts_once() -> None:
    policy = DecayingLFU(rate=0.5, steps_per_decay=1)
    trained = Trained(Dynamic(eviction=policy), 20)
    trained.step([3] * 8)
    for _ in range(3):
        trained.forward([3]).sum().backward()
    assert trained.scores() == {3: 4 + 3}


@pytest.mark.parametrize("eviction", [LFU(), DecayingLFU(rate=0.1, steps_per_decay=1)])
def test_ids_that_came_often_long_ago_make_room(eviction: LFU | DecayingLFU) -> None:
    trained = Trained(Dynamic(eviction=eviction), 2)
    for ids in [1] * 9, [2] * 9, [], [], [3], [], [], [4]:
        trained.step(ids)
    assert set(trained.scores()) == ({1, 2} if isinstance(eviction, LFU) else {3, 4})


def test_tables_evict_down_to_a_number_of_rows() -> None:
    """The least score first, then the longest unused; other tables keep theirs."""
    for eviction, kept in ((LRU(), {1, 5, 6}), (LFU(), {1, 3, 6})):
        trained = Trained(Dynamic(eviction=eviction), 20)
        for ids in [1, 1, 2], [3, 3], [4], [5], [1], [6]:
            trained.step(ids, [8, 9])
        trained.module.evict(max_rows=3, table="a")
        assert set(trained.scores()) == kept
        assert set(trained.scores(1)) == {8, 9}
        counters = trained.state.counters[0]
        assert counters[Counter.EVICTED_TARGET] == 3
        assert counters[Counter.SIZE] == 3
        trained.module.evict(max_rows=5, table="a")
        assert set(trained.scores()) == kept
        trained.step([2])
        assert set(trained.scores()) == {*kept, 2}


def test_rows_in_use_are_not_evicted() -> None:
    trained = Trained(Dynamic(), 20)
    for ids in [1, 2], [3], [4]:
        trained.step(ids)
    trained.forward([5, 1]).sum().backward()
    trained.module.evict(max_rows=0, table="a")
    assert set(trained.scores()) == {1, 5}
    trained.optimizer.step()
    bag = EmbeddingBag(5, 2, mode="sum", dynamic=Dynamic())
    bag(torch.tensor([[1, 2]]))
    bag.evict(max_rows=0)
    assert bag.eval()(torch.tensor([[1, 2]])).any()


def test_bad_settings_are_refused_by_name() -> None:
    trained = Trained(Dynamic(), 20)
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\), got 1\.0"):
        DecayingLFU(rate=1.0, steps_per_decay=3)
    with pytest.raises(TypeError, match="rate must be a float, got 'half'"):
        DecayingLFU(rate="half", steps_per_decay=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps_per_decay must be at least 1, got 0"):
        DecayingLFU(rate=0.5, steps_per_decay=0)
    with pytest.raises(ValueError, match=r"table must be .*\['a', 'b'\], got None"):
        trained.module.evict(max_rows=3)
    for number in (1.5, True, "2"):
        with pytest.raises(TypeError, match=f"max_rows must be an int, got {number!r}"):
            trained.module.evict(max_rows=number, table="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_rows must be at least 0, got -1"):
        trained.module.evict(max_rows=-1, table="a")


@pytest.mark.parametrize("where", ["before initialization", "in it", "in it twice"])
def test_an_interrupted_admission_leaves_no_id_a_row_of_another(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dynamic = Dynamic(eviction=LRU(), deletion_log=100)
    trained, fresh = (Trained(dynamic, capacity=8) for _ in range(2))
    for first in range(0, 40, 4):  # leaves values in all rows
        trained.step([*range(first, first + 4)], [*range(first, first + 4)])
    (group,) = trained.module.table_set.current_groups()
    mark = trained.module.delta().mark
    num_left = 2 if where == "in it twice" else 1
    of_whom, name = group, "initialize"
    if where == "before initialization":
        of_whom, name = group.index._row_keys, "note"  # type: ignore[attr-defined]
    done = getattr(of_whom, name)

    def interrupt(*arguments: object) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left >= 0:
            raise KeyboardInterrupt
        done(*arguments)

    monkeypatch.setattr(of_whom, name, interrupt)
    new = [100, 101, 102]
    with pytest.raises(KeyboardInterrupt):
        trained.forward(new, new)
    if where == "in it twice":
        trained.forward([200])  # the next admission sees to it
    assert set(new) <= trained.scores().keys()
    fresh.forward(new, new)
    found = [of.module.eval()(_batch_of_each(new)).values() for of in (trained, fresh)]
    assert torch.equal(*found)
    with pytest.raises(SnapshotDueError):
        trained.module.delta(since=mark)
    assert num_left <= 0


def _batch_of_each(ids: list[int]) -> SparseFeatures:
    """A sample for each id, in both tables."""
    each = [[number] for number in ids]
    return SparseFeatures.from_dict({"a": each, "b": each})
