"""Dynamic tables that give rows to the ids alone that an admission policy chooses."""

import copy
import io
from collections import Counter as Counts

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchembed
from tests.support.dynamic_tables import ids_held
from tests.support.tolerance import assert_same_bits
from torchembed import (
    LFU,
    Chance,
    CountMinSketch,
    Dynamic,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    MinimumCount,
    Probability,
    SparseFeatures,
)
from torchembed.tables import clear_ids

POLICIES = {
    "minimum count": MinimumCount(3),
    "sketch": CountMinSketch(threshold=3, width=1 << 16),
}


def bags(dynamic: Dynamic, capacity: int = 40) -> EmbeddingBagCollection:
    settings = {"num_embeddings": capacity, "embedding_dim": 4, "dynamic": dynamic}
    names = "a", "b"
    configs = [EmbeddingBagConfig(name=n, feature_names=(n,), **settings) for n in names]  # type: ignore[arg-type]
    return EmbeddingBagCollection(configs)


def batch(*ids: int) -> SparseFeatures:
    """Ids of table ``a``, and none of ``b``."""
    return SparseFeatures.from_dict({"a": [[i] for i in ids], "b": [[] for _ in ids]})


def train(module: EmbeddingBagCollection, *batches: SparseFeatures) -> list[set[int]]:
    """A step on each batch, and the ids that are held then."""
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.5)
    held = []
    for features in batches:
        module(features).values().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        held.append(ids_held(module))
    return held


@given(
    name=st.sampled_from(sorted(POLICIES)),
    batches=st.lists(st.lists(st.integers(-3, 3), max_size=9), max_size=8),
)
def test_ids_get_rows_when_they_reach_the_threshold(name: str, batches: list[list[int]]) -> None:
    """Not before, and then always; each of several occurrences in a batch counts."""
    module = bags(Dynamic(admission=POLICIES[name]))
    counts: Counts[int] = Counts()
    for ids, held in zip(batches, train(module, *(batch(*ids) for ids in batches)), strict=True):
        counts.update(ids)
        assert held == {id_ for id_, count in counts.items() if count >= 3}


@pytest.mark.parametrize("chance", Chance)
def test_ids_get_rows_by_chance(chance: Chance) -> None:
    """A threshold of 1 admits by one formula all, by the other 95 %; a great one hardly any."""
    ids = range(1000)
    drawn = Probability(threshold=1, chance=chance)
    often = len(train(bags(Dynamic(admission=drawn), 2000), batch(*ids))[-1])
    expected = {Chance.PROPORTIONAL: 1.0, Chance.PER_OCCURRENCE: 0.95}[chance]
    assert abs(often / 1000 - expected) <= 3 * (expected * (1 - expected) / 1000) ** 0.5
    seldom = Probability(threshold=2**31 - 1, chance=chance)
    assert train(bags(Dynamic(admission=seldom), 2000), batch(*ids)) == [set()]


@pytest.mark.parametrize("name", POLICIES)
def test_ids_that_are_not_admitted_read_zeros_and_get_no_gradient(name: str) -> None:
    module = bags(Dynamic(admission=POLICIES[name]))
    before = copy.deepcopy(module.state_dict()["embedding_bags.a.weight"])
    optimizer = torchembed.optim.SGD(module.parameters(), lr=1.0)
    vectors = module(batch(1, 2, 2)).values()
    assert not vectors.any()
    vectors.sum().backward()
    optimizer.step()
    assert_same_bits(module.state_dict()["embedding_bags.a.weight"], before)
    with_row = module(batch(1, 2)).values()
    assert with_row[1].any()
    assert not with_row[0].any()


@pytest.mark.parametrize("name", POLICIES)
def test_evaluation_counts_nothing(name: str) -> None:
    module = bags(Dynamic(admission=POLICIES[name]))
    for _ in range(3):
        module.eval()(batch(1, 1, 2))
        module.lookup(batch(1, 1, 2))
        with torch.no_grad():
            module.train()(batch(1, 1, 2))
    assert train(module, batch(1, 1), batch(1)) == [set(), {1}]


def test_ids_that_were_evicted_are_counted_anew() -> None:
    module = bags(Dynamic(admission=MinimumCount(2)), capacity=2)
    batches = [1, 1], [2, 2], [3, 3], [1], [1]
    held = train(module, *(batch(*ids) for ids in batches))
    assert held == [{1}, {1, 2}, {2, 3}, {2, 3}, {1, 3}]


def test_ids_that_find_no_row_keep_their_counts() -> None:
    """Ids that a full table refuses are admitted as soon as there is room."""
    module = bags(Dynamic(admission=MinimumCount(3)), capacity=2)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.5)
    # Gradients of both rows wait for an update, so that neither may go.
    module(batch(1, 1, 1, 2, 2, 2)).values().sum().backward()
    module(batch(5, 5, 5)).values().sum().backward()
    assert ids_held(module) == {1, 2}
    optimizer.step()
    train(module, batch(7))
    assert 5 in train(module, batch(5))[-1]


@pytest.mark.parametrize("eviction", [torchembed.LRU(), LFU()], ids=["lru", "lfu"])
@pytest.mark.parametrize("name", POLICIES)
def test_state_dicts_and_copies_hold_the_counts(name: str, eviction: torchembed.LFU) -> None:
    dynamic = Dynamic(admission=POLICIES[name], eviction=eviction)
    module = bags(dynamic)
    train(module, batch(1, 2, 2), batch(3, 3, 3))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    resumed = bags(dynamic)
    train(resumed, batch(8, 8, 9))
    resumed.load_state_dict(torch.load(file))
    for same in (copy.deepcopy(module), resumed, module.double().float()):
        assert train(same, batch(1, 2, 8, 9, 9)) == [{2, 3}]
    other = bags(Dynamic(eviction=eviction))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*embedding_bags\.a\.index\."):
        other.load_state_dict(resumed.state_dict())


DRAWN = {
    "chance": Probability(threshold=2),
    "in proportion": Probability(threshold=2, chance=Chance.PROPORTIONAL),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.uint64], ids=str)
@pytest.mark.parametrize("name", [*POLICIES, *DRAWN])
def test_ids_of_other_dtypes_are_admitted_as_those_of_int64(name: str, dtype: torch.dtype) -> None:
    states = []
    for of_run in (torch.int64, dtype):
        dynamic = Dynamic(admission={**POLICIES, **DRAWN}[name], eviction=LFU())
        module = EmbeddingBag(200, 4, mode="sum", dynamic=dynamic, seed=1)
        optimizer = torchembed.optim.SGD(module.parameters(), lr=0.5)
        drawn = torch.Generator().manual_seed(0)
        for _ in range(4):
            ids = torch.randint(2**31 - 40, 2**31, (8, 4), generator=drawn)
            module(ids.to(of_run)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(module.state_dict())
    assert states[0]["index.digests"].any()
    for key, tensor in states[0].items():
        assert_same_bits(states[1][key], tensor)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_sketch_counts_on_in_a_module_of_another_seed(seed: int) -> None:
    """And under the keys that it brought, in checkpoints of that module too, until it is loaded
    anew; an empty table keeps the keys."""
    dynamic = Dynamic(admission=CountMinSketch(threshold=3, width=1 << 16))
    first, second, third = (
        EmbeddingBag(200, 4, mode="sum", dynamic=dynamic, seed=s) for s in (1, seed, 3)
    )
    ids = torch.arange(50)[None]
    for module, successor in ((first, second), (second, third)):
        assert not module(ids).any()
        successor.load_state_dict(module.state_dict())
    assert third(ids).any()
    assert third.statistics()["weight"].size == 50
    clear_ids(third.table_set.tables[0])
    state, of_first = third.state_dict(), first.state_dict()
    assert torch.equal(state["index.sketch_keys"], of_first["index.sketch_keys"])
    assert not state["index.sketch"].any()
    assert not torch.equal(
        EmbeddingBag(200, 4, mode="sum", dynamic=dynamic, seed=3).state_dict()["index.sketch_keys"],
        of_first["index.sketch_keys"],
    )


def test_admission_must_be_a_policy() -> None:
    with pytest.raises(TypeError, match=r"admission must be MinimumCount\(\.\.\.\), .* got 3"):
        Dynamic(admission=3)  # type: ignore[arg-type]


def test_each_step_of_torchs_optimizers_draws_anew() -> None:
    """Forwards between two steps are one batch, whoever steps: else an id that was not drawn once
    never would be."""
    held = []
    for kind in (torch.optim.SGD, torchembed.optim.SGD):
        module = bags(Dynamic(admission=Probability(threshold=4)))
        optimizer = kind(module.parameters(), lr=0.5)
        for _ in range(12):
            optimizer.zero_grad()
            for features in (batch(1, 2, 3), batch(-4, 5, 6)):
                module(features).values().square().sum().backward()
            optimizer.step()
            held.append(ids_held(module))
    assert held[:12] == held[12:]
    assert held[0] != held[11] == {1, 2, 3, -4, 5, 6}


COUNTING = {"minimum count": MinimumCount(1), "sketch": CountMinSketch(threshold=1, width=1 << 16)}


@pytest.mark.parametrize("name", COUNTING)
def test_under_lfu_new_ids_compete_by_all_of_their_occurrences(name: str) -> None:
    """Not by those of one batch alone; an id that was refused is counted on."""
    old, new = batch(1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), batch(99)
    steps = train(bags(Dynamic(eviction=LFU(), admission=COUNTING[name]), 3), old, *[new] * 4)
    # Rows of the two batches before are not evicted.
    assert steps == [{1, 2, 3}] * 3 + [{2, 3, 99}] * 2
    uncounted = train(bags(Dynamic(eviction=LFU()), 3), old, *[new] * 4)
    assert uncounted == [{1, 2, 3}] * 5
