"""Dynamic tables whose rows expire when training does not use them for long enough."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchembed
from torchembed import (
    LFU,
    LRU,
    Dynamic,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    SparseFeatures,
)
from torchembed.ops.hash_table import Counter, HashTables
from torchembed.tables import HashIndex


def bags(dynamic: Dynamic, capacity: int) -> EmbeddingBagCollection:
    """Two tables in one group."""
    settings = {"num_embeddings": capacity, "embedding_dim": 4, "dynamic": dynamic}
    configs = [EmbeddingBagConfig(name=n, feature_names=(n,), **settings) for n in "ab"]  # type: ignore[arg-type]
    return EmbeddingBagCollection(configs)


def batch(a: list[int], b: list[int]) -> SparseFeatures:
    return SparseFeatures.from_dict({"a": [a], "b": [b]})


def hash_tables_of(module: EmbeddingBagCollection) -> HashTables:
    (group,) = module.table_set.current_groups()
    assert isinstance(group.index, HashIndex)
    return group.index.hash_tables


def ids_held(module: EmbeddingBagCollection) -> list[set[int]]:
    state = hash_tables_of(module)
    parts = zip(state.keys.chunk(2), state.digests.chunk(2), strict=True)
    return [set(keys[digests > 0].tolist()) for keys, digests in parts]


class Trained:
    """Two tables and their optimizer."""

    def __init__(self, dynamic: Dynamic, capacity: int = 20) -> None:
        self.module = bags(dynamic, capacity)
        self.optimizer = torchembed.optim.SGD(self.module.parameters(), lr=0.1)

    def step(self, a: list[int], b: list[int]) -> list[set[int]]:
        """A step; the ids that each table holds then."""
        self.module(batch(a, b)).values().square().sum().backward()
        self.optimizer.step()
        return ids_held(self.module)


IDS = st.lists(st.integers(0, 9), max_size=3)


@given(
    eviction=st.sampled_from([LRU(), LFU()]),
    batches=st.lists(st.tuples(IDS, IDS), max_size=14),
    ttl_steps=st.integers(2, 5),
    sweep_steps=st.integers(1, 100),
)
def test_ids_go_when_no_step_uses_them(
    eviction: LRU | LFU,
    batches: list[tuple[list[int], list[int]]],
    ttl_steps: int,
    sweep_steps: int,
) -> None:
    """Never before ``ttl_steps`` steps without them, and at once then: each step looks at all of
    tables of one block, whatever ``sweep_steps`` is."""
    trained = Trained(Dynamic(eviction=eviction, ttl_steps=ttl_steps, sweep_steps=sweep_steps))
    last_use: list[dict[int, int]] = [{}, {}]
    num_gone = age = 0
    for step, ids in enumerate(batches):
        found = trained.step(*ids)
        for held, used, uses in zip(found, ids, last_use, strict=True):
            uses.update(dict.fromkeys(used, step))
            for id_, last in list(uses.items()):
                if step - last < ttl_steps:
                    assert id_ in held
                if step - last >= ttl_steps:
                    assert id_ not in held
                if id_ not in held:
                    del uses[id_]
                    num_gone, age = num_gone + 1, age + step - last
            assert held == set(uses)
    counters = hash_tables_of(trained.module).counters.sum(0)
    assert counters[Counter.EVICTED_EXPIRED] == num_gone
    assert counters[Counter.EVICTED_AGE] == age
    assert counters[Counter.SIZE] == sum(map(len, last_use))


@pytest.mark.parametrize("sweep_steps", [1, 2, 3, 4, 1000])
def test_each_step_looks_at_some_blocks_of_larger_tables(sweep_steps: int) -> None:
    """The table has three blocks; each of its rows is looked at once in ``sweep_steps`` steps, or
    in as many as there are blocks, where these are fewer."""
    ids = list(range(9000))
    trained = Trained(Dynamic(ttl_steps=2, sweep_steps=sweep_steps), capacity=3 * 4096)
    held = [trained.step(ids, ids[:5])] + [trained.step([], []) for _ in range(5)]
    num_held = [len(of_table) for of_table, _ in held]
    assert num_held[:2] == [9000, 9000]
    num_gone = [before - after for before, after in itertools.pairwise(num_held[1:])]
    num_steps = min(sweep_steps, 3)
    assert [gone > 0 for gone in num_gone] == [step < num_steps for step in range(4)]
    assert num_held[-1] == 0
    assert not held[-1][1]


def test_ids_that_come_again_start_anew() -> None:
    trained = Trained(Dynamic(ttl_steps=2, sweep_steps=1))
    module, ids = trained.module, batch([1], [])
    first = module(ids).values().detach().clone()
    trained.step([1], [])
    assert not torch.equal(module.eval()(ids).values(), first)
    module.train()
    assert [trained.step([], [2]) for _ in range(2)] == [[{1}, {2}], [set(), {2}]]
    assert not module.eval()(ids).values().any()
    assert torch.equal(module.train()(ids).values(), first)


def test_rows_whose_gradients_wait_do_not_go() -> None:
    module = bags(Dynamic(ttl_steps=2, sweep_steps=1), 20)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    for id_ in range(6):
        module(batch([id_], [])).values().sum().backward()
    assert ids_held(module)[0] == set(range(6))
    optimizer.step()
    assert ids_held(module)[0] == set(range(6))


def test_evaluation_lets_nothing_expire() -> None:
    trained = Trained(Dynamic(ttl_steps=2, sweep_steps=1))
    trained.step([1], [2])
    for _ in range(4):
        trained.module.eval()(batch([3], [4]))
    assert ids_held(trained.module) == [{1}, {2}]


class Clock:
    """Says the time that it is told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    waits=st.lists(st.floats(0, 3), min_size=1, max_size=30), sweep_steps=st.sampled_from([1, 1000])
)
def test_ids_go_when_nothing_uses_them_for_some_seconds(
    waits: list[float], sweep_steps: int
) -> None:
    """Never before; and then, at most a 64th part late, in the next step: the table has one
    block."""
    clock, ttl_seconds = Clock(), 6.4
    dynamic = Dynamic(ttl_seconds=ttl_seconds, clock=clock, sweep_steps=sweep_steps)
    trained = Trained(dynamic)
    trained.step([1], [1])
    age = 0.0
    for wait in waits:
        clock.now += wait
        age += wait
        held, _ = trained.step([2], [])
        if age < ttl_seconds - 1e-9:
            assert 1 in held
        if age >= ttl_seconds * 65 / 64 + 3:
            assert 1 not in held
        assert 2 in held


def test_rows_that_a_checkpoint_brings_live_from_the_load_on() -> None:
    clock = Clock()
    dynamic = Dynamic(ttl_seconds=10.0, clock=clock, sweep_steps=1)
    first, second = Trained(dynamic), Trained(dynamic)
    for _ in range(9):
        first.step([1], [])
    clock.now += 20
    second.step([3], [])
    second.step([3], [])
    clock.now += 20
    second.step([3], [])
    second.module.load_state_dict(first.module.state_dict())
    for _ in range(4):
        second.step([2], [])
    assert ids_held(second.module)[0] == {1, 2}
    clock.now += 20
    assert [second.step([2], [])[0] for _ in range(2)][-1] == {2}


def test_a_clock_that_runs_backwards_is_named() -> None:
    clock = Clock()
    trained = Trained(Dynamic(ttl_seconds=10.0, clock=clock))
    trained.step([1], [])
    clock.now -= 1
    with pytest.raises(ValueError, match=r"clock must not run backwards, got 99\.0 seconds after"):
        trained.step([1], [])


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="ttl_steps must be at least 2, got 1"):
        Dynamic(ttl_steps=1)
    with pytest.raises(TypeError, match=r"ttl_steps must be an int, got 2\.5"):
        Dynamic(ttl_steps=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ttl_seconds must be positive and finite, got 0"):
        Dynamic(ttl_seconds=0)
    with pytest.raises(TypeError, match="clock must be a function without arguments, got 3"):
        Dynamic(clock=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sweep_steps must be at least 1, got 0"):
        Dynamic(ttl_steps=5, sweep_steps=0)
    for settings, message in (
        ({"sweep_steps": 5}, "ttl_steps or ttl_seconds or max_rows or max_bytes, got 5"),
        ({"evict_to": 0.5, "ttl_steps": 3}, r"max_rows or max_bytes, got 0\.5"),
        ({"clock": Clock(), "ttl_steps": 3}, "ttl_seconds, got .*Clock"),
    ):
        (name, *_) = settings
        with pytest.raises(ValueError, match=f"{name} must be left out without {message}"):
            Dynamic(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf])
def test_a_clock_says_finite_numbers(now: float) -> None:
    clock = Clock()
    trained = Trained(Dynamic(ttl_seconds=10.0, clock=clock))
    clock.now = now
    with pytest.raises(ValueError, match=f"clock must return a finite number .*, got {now}"):
        trained.step([1], [])
