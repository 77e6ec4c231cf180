"""Errors of dynamic tables come before anything has changed."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.hash_tables import blocks_of
from torchembed import (
    LFU,
    LRU,
    CallerScores,
    DecayingLFU,
    Dynamic,
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EpochLFU,
    HashedRows,
    MinimumCount,
    SparseFeatures,
)


def held(module: Embedding) -> list[int]:
    """The ids that have rows, ascending."""
    contents = module.table_set.tables[0].index_contents()
    return sorted(contents["ids"][contents["digests"] > 0].tolist())


def collection() -> EmbeddingBagCollection:
    """Two dynamic tables, ``a`` and ``b``."""
    settings: dict[str, Any] = {"num_embeddings": 8, "embedding_dim": 4, "dynamic": Dynamic()}
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(name=n, feature_names=(f"of_{n}",), **settings) for n in "ab"]
    )


def entries(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the state dict."""
    return {key: value.clone() for key, value in module.state_dict().items()}


def check_refused(module: torch.nn.Module, state: dict[str, Any], match: str, **how: bool) -> None:
    """Check that loading ``state`` raises and changes nothing."""
    before = entries(module)
    with pytest.raises(RuntimeError, match=match):
        module.load_state_dict(state, **how)
    after = module.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_a_table_of_float64_gives_no_id_a_row_without_values() -> None:
    with pytest.raises(TypeError, match="dtype of a dynamic table must be float32"):
        Embedding(8, 4, dtype=torch.float64, dynamic=Dynamic())
    module = Embedding(8, 4, dynamic=Dynamic())
    row = module(torch.tensor([1]))
    module.double()
    assert torch.equal(module.eval()(torch.tensor([1])), row.double())
    with pytest.raises(TypeError, match="tables weight must be float32, float16 or bfloat16"):
        module.train()(torch.tensor([2]))
    assert held(module) == [1]
    module.float()(torch.tensor([2]))
    assert held(module) == [1, 2]


def test_ids_that_were_floating_are_not_loaded() -> None:
    module, other = (Embedding(8, 4, dynamic=Dynamic()) for _ in range(2))
    module(torch.tensor([2**53 + 1]))
    state = module.state_dict()
    state["index.ids"] = state["index.ids"].double()
    with pytest.raises(RuntimeError, match=r"index\.ids must be torch\.int64, got torch\.float64"):
        other.load_state_dict(state)
    assert held(other) == []


@pytest.mark.parametrize("field", ["num_embeddings", "embedding_dim"])
@pytest.mark.parametrize("value", [1.5, "8"])
def test_sizes_are_integers(field: str, value: object) -> None:
    settings: dict[str, Any] = {"num_embeddings": 8, "embedding_dim": 4, field: value}
    with pytest.raises(TypeError, match=f"{field} of table t must be an int, got {value!r}"):
        EmbeddingBagConfig(name="t", feature_names=("f",), **settings)


def test_sizes_beyond_any_memory_are_named() -> None:
    with pytest.raises(ValueError, match=r"deletion_log must be at most 1099511627776, got 2199"):
        Dynamic(deletion_log=2**41)
    match = "num_embeddings of dynamic table weight must be at most 1099511627776, got 4611686018"
    with pytest.raises(ValueError, match=match):
        Embedding(2**62, 4, dynamic=Dynamic())
    match = (
        rf"tables weight take {8 * 16} bytes of rows, and {8 * 17 + 2**45} of what finds them and "
        "of their logs, for which there is no memory on cpu or its host; lower num_embeddings or "
        "deletion_log, shard them"
    )
    with pytest.raises(torch.OutOfMemoryError, match=match):
        Embedding(8, 4, dynamic=Dynamic(deletion_log=2**40))


def test_a_clock_says_numbers() -> None:
    clock: Callable[[], Any] = lambda: None  # noqa: E731
    module = Embedding(8, 4, dynamic=Dynamic(ttl_seconds=1.0, clock=clock))
    with pytest.raises(TypeError, match="clock must return a number of seconds, got None"):
        module(torch.tensor([1]))
    assert held(module) == []


def test_weights_of_dynamic_tables_are_not_tied() -> None:
    a, b = (Embedding(8, 4, dynamic=Dynamic()) for _ in range(2))
    static = EmbeddingBag(8, 4, mode="sum")
    own = b.weight
    with pytest.raises(ValueError, match=r"dynamic tables .* cannot be tied; call one module"):
        b.weight = a.weight
    with pytest.raises(ValueError, match="weight of table weight must not be that of another"):
        static.weight = a.weight
    with pytest.raises(ValueError, match="cannot be tied"):
        b.weight = static.weight
    assert b.weight is own
    b.weight = own
    holders = collection().embedding_bags
    with pytest.raises(ValueError, match=r"weight of table b .* got the one of table a: dynamic"):
        holders["b"].weight = holders["a"].weight
    linear = torch.nn.Linear(4, 8)
    linear.weight = a.weight
    assert linear.weight is a.weight


@pytest.mark.parametrize("strict", [True, False])
def test_rows_are_not_loaded_without_their_ids(strict: bool) -> None:
    of_two, of_one = collection(), Embedding(8, 4, dynamic=Dynamic())
    of_two(SparseFeatures.from_dict({"of_a": [1, 2], "of_b": [3, 4]}))
    of_one(torch.tensor([1, 2]))
    new = collection(), Embedding(8, 4, dynamic=Dynamic())
    for module, other in zip((of_two, of_one), new, strict=True):
        other_ids = torch.tensor([5, 6])
        if isinstance(other, Embedding):
            other(other_ids)
        else:
            other(SparseFeatures.from_dict({"of_a": [5, 6], "of_b": [5, 6]}))
        weights = {k: v for k, v in entries(module).items() if k.endswith("weight")}
        match = r"rows are nothing without their ids; the state dict lacks \[.*index\.ids"
        check_refused(other, weights, match, strict=strict)
        some = {k: v for k, v in entries(module).items() if not k.endswith("touched")}
        check_refused(other, some, r"lacks \['.*index\.touched'\]", strict=strict)
    new[1].load_state_dict({}, strict=False)
    assert held(new[1]) == [5, 6]


def test_states_of_other_policies_and_damaged_ones_change_nothing() -> None:
    recent, frequent, counting = (
        Embedding(8, 4, dynamic=dynamic)
        for dynamic in (
            Dynamic(eviction=LRU()),
            Dynamic(eviction=LFU()),
            Dynamic(admission=MinimumCount(2)),
        )
    )
    for module, number in ((recent, 1), (frequent, 2), (counting, 3)):
        module(torch.tensor([number, number + 10]))
        module(torch.tensor([number]))
    for strict in (True, False):
        match = r"has \['index\.scores'\], too"
        check_refused(recent, entries(frequent), match, strict=strict)
    check_refused(frequent, entries(recent), r"lacks \['index\.scores'\]")
    check_refused(recent, entries(counting), r"has \['index\.counted_ids'")
    for name in ("digests", "counted_digests"):
        damaged = entries(counting)
        digests = damaged[f"index.{name}"]
        digests[digests > 0] += 1
        check_refused(counting, damaged, rf"index\.{name} must be those of the ids beside them")
    counting.load_state_dict(entries(counting))
    assert held(counting) == [3]


SCORED = {
    "LFU": LFU(),
    "DecayingLFU": DecayingLFU(rate=0.5, steps_per_decay=2),
    r"EpochLFU(steps_per_epoch=3)": EpochLFU(steps_per_epoch=3),
    r"EpochLFU(steps_per_epoch=30)": EpochLFU(steps_per_epoch=30),
    "CallerScores": CallerScores(),
}


@pytest.mark.parametrize(("own", "other"), list(itertools.permutations(SCORED, 2)))
def test_scores_of_another_policy_are_refused(own: str, other: str) -> None:
    source, module = (Embedding(8, 4, dynamic=Dynamic(eviction=SCORED[n])) for n in (other, own))
    source(torch.tensor([1, 2]))
    module(torch.tensor([3]))
    match = re.escape(
        f"index.policy must be that of dynamic table weight, {own}, whose scores those of {other} "
        "are not. Nothing of the table was loaded"
    )
    if "CallerScores" in (own, other):  # which has an entry more
        match = r"as its eviction and admission say, .*index\.step_score"
    for strict in (True, False):
        check_refused(module, entries(source), match, strict=strict)
    source.load_state_dict(entries(source))


def test_policies_that_keep_their_scores_and_unknown_ones() -> None:
    """Another rate changes no score; a number that no policy has is named."""
    slow, fast = (
        Embedding(8, 4, dynamic=Dynamic(eviction=DecayingLFU(rate=rate, steps_per_decay=steps)))
        for rate, steps in ((0.5, 2), (0.1, 5))
    )
    slow(torch.tensor([1, 2]))
    fast.load_state_dict(entries(slow))
    assert held(fast) == [1, 2]
    state = entries(slow)
    state["index.policy"][0] = 77
    check_refused(fast, state, "those of policy number 77, which this version does not know are")


@pytest.mark.parametrize("strict", [True, False])
def test_static_tables_take_no_rows_of_dynamic_ones(strict: bool) -> None:
    source, module = Embedding(8, 4, dynamic=Dynamic()), Embedding(8, 4)
    source(torch.tensor([1, 2]))
    match = (
        "static table weight, whose ids are the numbers of its rows, must be loaded without "
        "entries under index, got those of a dynamic table, .* load a checkpoint, or rows by id"
    )
    check_refused(module, entries(source), match, strict=strict)
    without_rows = {k: v for k, v in entries(source).items() if k != "weight"}
    check_refused(module, without_rows, match, strict=strict)
    settings: dict[str, Any] = {"num_embeddings": 8, "embedding_dim": 4}
    static = EmbeddingBagCollection(
        [EmbeddingBagConfig(name=n, feature_names=(f"of_{n}",), **settings) for n in "ab"]
    )
    check_refused(static, entries(collection()), "static table b, whose ids are", strict=strict)


IDS = torch.arange(20) * 10**9


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have at most 8 rows."""
    blocks_of(8, monkeypatch)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("sizes", "policies", "divisions"),
    [
        (
            (24, 24),
            (Dynamic(), Dynamic(initial_capacity=24)),
            ("3 blocks of 1 buckets of 8 rows, 0", "4 blocks of 1 buckets of 6 rows, 0"),
        ),
        (
            (24, 16),
            (Dynamic(), Dynamic(missing=HashedRows(8))),
            ("3 blocks of 1 buckets of 8 rows, 0", "2 blocks of 1 buckets of 8 rows, 8"),
        ),
    ],
)
def test_rows_that_are_divided_otherwise_are_refused(
    sizes: tuple[int, int], policies: tuple[Dynamic, Dynamic], divisions: tuple[str, str]
) -> None:
    modules = [Embedding(n, 4, dynamic=of) for n, of in zip(sizes, policies, strict=True)]
    for module, ids in zip(modules, IDS.split(10), strict=True):
        assert module.weight.shape == (24, 4)
        module(ids)
    for module, source, division in zip(modules, modules[::-1], divisions, strict=True):
        match = (
            rf"index\.ids must hold ids where dynamic table weight looks for them \({division} "
            r"shared rows, part 1 of 1\), got \d+ of 24 rows otherwise: .* by another "
            r"initial_capacity, HashedRows or number of ranks\. Nothing of the table was loaded: "
            r"load a checkpoint, or rows by id"
        )
        for strict in (True, False):
            check_refused(module, entries(source), match, strict=strict)
        module.load_state_dict(entries(module))


@pytest.mark.usefixtures("small_blocks")
def test_a_table_that_could_grow_does_not_for_rows_that_are_refused() -> None:
    small = Embedding(24, 4, dynamic=Dynamic(initial_capacity=1))
    whole = Embedding(24, 4, dynamic=Dynamic())
    whole(IDS)
    check_refused(small, entries(whole), "4 blocks of 1 buckets of 6 rows")
    assert small.weight.shape == (6, 4)


@pytest.mark.usefixtures("small_blocks")
def test_each_row_that_holds_what_it_should_not_is_counted() -> None:
    module = Embedding(24, 4, dynamic=Dynamic(missing=HashedRows(4)))
    module(IDS[:12])
    state = entries(module)
    digests = state["index.digests"]
    held, free = digests.nonzero().flatten(), (digests[:24] == 0).nonzero().flatten()
    first, last = int(held[0]), int(held[-1])
    assert first < 8 <= 16 <= last  # in different blocks, of one bucket each
    swapped, twice = entries(module), entries(module)
    beside = next(row for row in free.tolist() if row // 8 == first // 8)
    for key in ("index.ids", "index.digests"):
        swapped[key][first], swapped[key][last] = state[key][last], state[key][first]
        twice[key][beside] = state[key][first]
    check_refused(module, swapped, r"got 2 of 28 rows")
    check_refused(module, twice, r"got 1 of 28 rows")
    for row in (int(free[0]), 24, 27):
        damaged = entries(module)
        damaged["index.ids"][row] += 1
        check_refused(module, damaged, r"got 1 of 28 rows")
    module.load_state_dict(state)


def test_a_weight_of_other_columns_is_reported() -> None:
    module, wide = Embedding(8, 4, dynamic=Dynamic()), Embedding(8, 6, dynamic=Dynamic())
    wide(torch.tensor([1]))
    check_refused(module, entries(wide), r"size mismatch for weight")
