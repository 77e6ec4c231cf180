"""Dynamic tables in train steps: those of pipelines insert and evict as a loop by hand does."""

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.support.lanes import picked_kernel
from tests.support.tape import taped_captures
from tests.support.tiny_model import step_by_hand
from tests.support.tiny_training import assert_same_state, results_of, state_of
from torchembed import (
    LFU,
    CountMinSketch,
    DecayingLFU,
    Dynamic,
    EmbeddingBag,
    EpochLFU,
    HashedRows,
    MinimumCount,
    Probability,
    SparseFeatures,
)
from torchembed.checkpoints import load_rows, model_rows
from torchembed.data import Batch
from torchembed.ops.hash_table import Counter
from torchembed.optim import split_parameters
from torchembed.tables import HashIndex
from torchembed.training import CheckpointFolder, TrainingRun, TrainPipeline

CPU = torch.device("cpu")
KEYS = ("a", "b", "c")
NUM_IDS = 60
SPREAD = 0x9E3779B97F4A7C15
LOSS = F.binary_cross_entropy_with_logits


class Ranker(nn.Module):
    """A logit from pooled vectors of a dynamic table, which two features use, and of a static one,
    and of modules of one dynamic table each."""

    def __init__(self, dynamic: Dynamic, capacity: int, *, modes: Sequence[str] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = torchembed.EmbeddingBagConfig
        self.tables = torchembed.EmbeddingBagCollection(
            [
                config(
                    name="a",
                    num_embeddings=capacity,
                    embedding_dim=4,
                    feature_names=("a", "c"),
                    dynamic=dynamic,
                ),
                config(name="b", num_embeddings=NUM_IDS, embedding_dim=4, feature_names=("b",)),
            ]
        )
        self.singles = nn.ModuleList(
            EmbeddingBag(capacity, 4, mode=mode, seed=1, padding_idx=0, dynamic=dynamic)
            for mode in modes
        )
        self.dense = nn.Sequential(nn.Linear(14, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        vectors = self.tables(sparse).values()
        for number, single in enumerate(self.singles):
            ids = sparse.values[8 * number : 8 * number + 16].view(8, 2)
            vectors = vectors + single(ids).repeat(1, 3)
        return self.dense(torch.cat([dense, vectors], dim=1))


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    tables, dense = split_parameters(model.parameters())
    return [torchembed.optim.Adam(tables, lr=0.05), torch.optim.Adam(dense, lr=0.05)]


def batch(seed: int, *, is_jagged: bool = False, bad: bool = False) -> Batch:
    """Ids of ``a`` and ``c`` are spread over all 64-bit numbers; a few come often, and which they
    are changes slowly."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([2, 1, 3]).repeat_interleave(8)
    if is_jagged:
        lengths = torch.randint(4, (24,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    skewed = torch.rand(int(offsets[-1]), generator=generator) ** 2 * 20
    ids = (skewed.long() + 3 * seed) % NUM_IDS
    is_of_b = torch.arange(24).repeat_interleave(lengths) // 8 == 1
    if bad:
        ids[is_of_b.nonzero()[0]] = NUM_IDS
    values = torch.where(is_of_b, ids, ids * torchembed.core.random_bits.signed64(SPREAD))
    shape: dict[str, Any] = {"offsets": offsets} if is_jagged else {"hotness": (2, 1, 3)}
    sparse = SparseFeatures(keys=KEYS, values=values, batch_size=8, **shape)
    dense = torch.randint(-2, 3, (8, 2), generator=generator).float()
    return Batch(dense, sparse, (dense[:, 0] > 0).float())


def index_of(model: Ranker) -> HashIndex:
    index = model.tables.table_set.tables[0].group.index
    assert isinstance(index, HashIndex)
    return index


def by_hand(model: Ranker, batches: Sequence[Batch]) -> list[float]:
    optimizers = optimizers_of(model)
    return [step_by_hand(model, LOSS, optimizers, batch).item() for batch in batches]


POLICIES = {
    "LRU": Dynamic(),
    "LFU": Dynamic(eviction=LFU()),
    "EpochLFU": Dynamic(eviction=EpochLFU(steps_per_epoch=3)),
    "MinimumCount": Dynamic(admission=MinimumCount(2)),
    "DecayingLFU": Dynamic(eviction=DecayingLFU(rate=0.5, steps_per_decay=2)),
    "ttl": Dynamic(ttl_steps=3, sweep_steps=4),
    "HashedRows": Dynamic(eviction=LFU(), admission=MinimumCount(2), missing=HashedRows(7)),
}
BATCHES = {
    "fixed": [batch(seed) for seed in range(14)],
    "jagged": [batch(seed, is_jagged=True) for seed in range(14)],
    "mixed": [batch(seed, is_jagged=seed in (5, 6, 11)) for seed in range(18)],
}
CAPACITIES = (24, 200)


@pytest.mark.parametrize(
    ("policy", "form", "capacity", "is_taped"),
    [
        # Capacities, and taped steps and those that are called again, in turns: any two of the four
        # come together.
        pytest.param(
            policy, form, CAPACITIES[(p + f) % 2], (f + p // 2) % 2 == 1, id=f"{policy}-{form}"
        )
        for (p, policy), (f, form) in itertools.product(enumerate(POLICIES), enumerate(BATCHES))
    ],
)
def test_captured_steps_equal_the_loop_by_hand(
    policy: str, form: str, capacity: int, is_taped: bool
) -> None:
    """While ids find free rows, and where they evict others at nearly each step."""
    # A tape refuses the reference of insert_keys, which is the host's own work.
    is_taped = is_taped and picked_kernel("insert_keys", "cpu") == "native"
    batches, dynamic = BATCHES[form], POLICIES[policy]
    expected = Ranker(dynamic, capacity)
    losses = by_hand(expected, batches)
    model = Ranker(dynamic, capacity)
    with taped_captures() if is_taped else contextlib.nullcontext():
        pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)
        assert results_of(pipeline, batches) == losses
    assert_same_state(model, state_of(expected))
    counters = index_of(model).hash_tables.counters[0]
    assert bool(counters[Counter.EVICTED_FULL]) == (capacity == 24)
    assert bool(counters[Counter.EVICTED_EXPIRED]) == (policy == "ttl")
    captured = [str(kind.form) for kind in pipeline.kinds]
    assert ("graph" in captured) == (form != "jagged")


def test_captured_steps_keep_to_a_bound_as_the_loop_by_hand() -> None:
    """Ids go without a full table, a bad batch between them, which is skipped."""
    dynamic = dataclasses.replace(POLICIES["EpochLFU"], max_rows=20, evict_to=0.5, deletion_log=99)
    good, modes = BATCHES["fixed"], ["sum"]
    batches = [*good[:8], batch(0, bad=True), *good[8:]]
    expected, model = (Ranker(dynamic, 200, modes=modes) for _ in range(2))
    losses = by_hand(expected, good)
    is_native = picked_kernel("insert_keys", "cpu") == "native"
    found, iterator = [], iter(batches)
    with taped_captures() if is_native else contextlib.nullcontext():
        pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)
        for number in range(len(batches)):
            with pytest.raises(IndexError) if number == 8 else contextlib.nullcontext():
                found.append(pipeline.progress(iterator).loss.item())
    assert found == losses
    assert_same_state(model, state_of(expected))
    counters = index_of(model).hash_tables.counters[0]
    assert counters[Counter.EVICTED_TARGET] > 0
    assert counters[Counter.EVICTED_FULL] == 0
    assert "graph" in [str(kind.form) for kind in pipeline.kinds]


def test_eager_steps_equal_the_loop_by_hand() -> None:
    batches = BATCHES["mixed"]
    expected, model = Ranker(Dynamic(), 24), Ranker(Dynamic(), 24)
    losses = by_hand(expected, batches)
    pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU)
    assert results_of(pipeline, batches) == losses
    assert_same_state(model, state_of(expected))


def test_modules_of_one_dynamic_table_train_in_captured_steps() -> None:
    """Their ids are admitted ahead of forward, those of padding never."""
    batches, modes = BATCHES["fixed"], ("sum", "mean", "max")
    expected, model = (Ranker(Dynamic(), 24, modes=modes) for _ in range(2))
    losses = by_hand(expected, batches)
    pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)
    assert results_of(pipeline, batches) == losses
    assert_same_state(model, state_of(expected))
    index = model.singles[0].table_set.tables[0].group.index
    assert isinstance(index, HashIndex)
    assert index.hash_tables.counters[0, Counter.EVICTED_FULL] > 0
    assert index.clock.numbers[3] > 0  # prepared ahead
    assert not (index.hash_tables.keys[index.hash_tables.digests > 0] == 0).any()


@pytest.mark.parametrize(("missing", "form"), [("initial", "fixed"), ((3, 1, -2, 0.5), "mixed")])
def test_ids_without_a_row_are_looked_up_alike_in_captured_steps(missing: Any, form: str) -> None:
    """Those that are not admitted, in collections and in modules of one table."""
    batches, modes = BATCHES[form], ("sum", "mean", "max") if form == "fixed" else ()
    losses = []
    for value in (missing, "zeros"):
        expected = Ranker(Dynamic(admission=MinimumCount(3), missing=value), 24, modes=modes)
        losses.append(by_hand(expected, batches))
        if value == missing:
            state = state_of(expected)
    assert losses[0] != losses[1]
    model = Ranker(Dynamic(admission=MinimumCount(3), missing=missing), 24, modes=modes)
    is_native = picked_kernel("insert_keys", "cpu") == "native"
    with taped_captures() if is_native else contextlib.nullcontext():
        pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)
        assert results_of(pipeline, batches) == losses[0]
    assert_same_state(model, state)
    assert "graph" in [str(kind.form) for kind in pipeline.kinds]


Load = Callable[[Ranker, list[torch.optim.Optimizer]], object]


def loads_state_dicts(source: Ranker, optimizers: list[torch.optim.Optimizer], _: Path) -> Load:
    saved = copy.deepcopy([source.state_dict(), *(of.state_dict() for of in optimizers)])

    def load(model: Ranker, others: list[torch.optim.Optimizer]) -> None:
        # A copy for each: torch's optimizers go on with the tensors that they are given.
        for target, state in zip((model, *others), copy.deepcopy(saved), strict=True):
            target.load_state_dict(state)

    return load


def loads_a_checkpoint(
    source: Ranker, optimizers: list[torch.optim.Optimizer], folder: Path
) -> Load:
    CheckpointFolder(folder).save(3, TrainingRun(model=source, optimizers=optimizers))
    return lambda model, others: CheckpointFolder(folder).load(
        TrainingRun(model=model, optimizers=others)
    )


def loads_rows(source: Ranker, optimizers: list[torch.optim.Optimizer], _: Path) -> Load:
    names = ("tables.embedding_bags.a.weight", "singles.0.weight")
    rows = {name: list(model_rows(source, name)) for name in names}
    return lambda model, _: [load_rows(model, name, chunks) for name, chunks in rows.items()]


@pytest.mark.parametrize("form", ["fixed", "mixed"])
@pytest.mark.parametrize("loads", [loads_state_dicts, loads_a_checkpoint, loads_rows])
def test_ids_of_a_prepared_batch_may_be_loaded(loads: Any, form: str, tmp_path: Path) -> None:
    """They have other rows then than those that were prepared."""
    source, batches = Ranker(Dynamic(), 200, modes=["sum"]), BATCHES[form]
    optimizers = optimizers_of(source)
    for one in batches[10:13]:
        step_by_hand(source, LOSS, optimizers, one)
    load = loads(source, optimizers, tmp_path)

    expected, model = (Ranker(Dynamic(), 200, modes=["sum"]) for _ in range(2))
    expected_optimizers, model_optimizers = map(optimizers_of, (expected, model))
    pipeline = TrainPipeline(model, LOSS, model_optimizers, device=CPU, capture=True)
    iterator = iter(batches)
    for number, one in enumerate(batches):
        if number in (6, 9):
            load(expected, expected_optimizers)
            load(model, model_optimizers)
        loss = step_by_hand(expected, LOSS, expected_optimizers, one)
        assert pipeline.progress(iterator).loss.item() == loss.item(), number
    assert "graph" in [str(kind.form) for kind in pipeline.kinds]
    for name in ("tables.embedding_bags.a.weight", "singles.0.weight"):
        found, wanted = ({}, {})
        for rows, of_model in ((found, model), (wanted, expected)):
            for chunk in model_rows(of_model, name):
                rows.update(zip(chunk.keys.tolist(), chunk.rows.tolist(), strict=True))
        assert found == wanted


class Bags(nn.Module):
    """A logit from bags between offsets, whose number of ids varies."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = EmbeddingBag(24, 4, mode=mode, seed=1, padding_idx=0, dynamic=Dynamic())
        self.dense = nn.Linear(4, 1)

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        ids, offsets, labels = batch
        return LOSS(self.dense(self.bags(ids, offsets))[:, 0], labels)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_spare_ids_are_not_inserted(mode: str) -> None:
    """Captured steps take ids of varying number with spare ones behind them."""
    batches = []
    for seed in range(16):
        b = batch(seed, is_jagged=True)
        batches.append((b.sparse.values, b.sparse.offsets[:8], b.labels))
    expected, model = Bags(mode), Bags(mode)
    optimizers = optimizers_of(expected)
    losses = []
    for one in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = expected(one)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    pipeline = TrainPipeline(model, None, optimizers_of(model), device=CPU, capture=True)
    assert results_of(pipeline, batches) == losses
    assert_same_state(model, state_of(expected))


class Computed(nn.Module):
    """A logit from the vectors of ids that forward computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = EmbeddingBag(24, 4, mode="sum", seed=1, dynamic=Dynamic(eviction=LFU()))
        self.dense = nn.Linear(4, 1)

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        ids, labels = batch
        return LOSS(self.dense(self.bags(ids * 3))[:, 0], labels)


@pytest.mark.parametrize("is_taped", [False, True], ids=["called", "taped"])
def test_steps_whose_forward_computes_ids_are_eager_and_say_so(is_taped: bool) -> None:
    batches = [(b.sparse.values.view(8, 6), b.labels) for b in BATCHES["fixed"]]
    expected, model = Computed(), Computed()
    optimizers = optimizers_of(expected)
    losses = []
    for one in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = expected(one)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    with taped_captures() if is_taped else contextlib.nullcontext():
        pipeline = TrainPipeline(model, None, optimizers_of(model), device=CPU, capture=True)
        with pytest.warns(UserWarning, match="bags: forward gives rows to ids that it computes"):
            assert results_of(pipeline, batches) == losses
    assert_same_state(model, state_of(expected))


@pytest.mark.parametrize(
    "dynamic",
    [
        Dynamic(),
        Dynamic(eviction=LFU()),
        Dynamic(admission=MinimumCount(3)),
        Dynamic(admission=CountMinSketch(threshold=3, width=500)),
        Dynamic(admission=Probability(threshold=3)),
    ],
    ids=["lru", "lfu", "minimum count", "sketch", "chance"],
)
def test_a_step_that_a_bad_batch_skips_inserts_and_counts_nothing(dynamic: Dynamic) -> None:
    batches = [batch(seed, bad=seed == 8) for seed in range(12)]
    expected, model = (Ranker(dynamic, 24, modes=["sum"]) for _ in range(2))
    losses = by_hand(expected, [b for n, b in enumerate(batches) if n != 8])
    pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)
    iterator, found, errors = iter(batches), [], 0
    while True:
        try:
            found.append(pipeline.progress(iterator).loss.item())
        except IndexError:
            errors += 1
        except StopIteration:
            break
    assert errors == 1
    assert found == losses
    assert_same_state(model, state_of(expected))


class DynamicFirst(nn.Module):
    """A loss of a bag of a dynamic table and, looked up after it, one of a static table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = EmbeddingBag(24, 4, mode="sum", seed=1, dynamic=Dynamic())
        self.second = EmbeddingBag(NUM_IDS, 4, mode="sum", seed=2)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        first, second = batch
        return (self.first(first) * self.second(second)).sum()


def test_eager_steps_check_all_joined_calls_before_any_table_inserts() -> None:
    batches = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1 << 40, (2, 6, 2), generator=generator)
        batches.append((ids[0].clone(), ids[1] % NUM_IDS + (NUM_IDS if seed == 5 else 0)))
    expected, model = DynamicFirst(), DynamicFirst()
    optimizer = torchembed.optim.SGD(expected.parameters(), lr=0.05)
    for number, one in enumerate(batches):
        if number != 5:
            optimizer.zero_grad()
            expected(one).backward()
            optimizer.step()
    optimizer = torchembed.optim.SGD(model.parameters(), lr=0.05)
    pipeline, iterator = TrainPipeline(model, None, [optimizer], device=CPU), iter(batches)
    for number in range(8):
        with pytest.raises(IndexError) if number == 5 else contextlib.nullcontext():
            pipeline.progress(iterator)
    assert_same_state(model, state_of(expected))


@pytest.mark.parametrize("lengths", [(1,), (2,), (2, 4), (5, 1, 2)], ids=str)
def test_short_iterators_and_those_that_follow_admit_each_batch_once(
    lengths: tuple[int, ...],
) -> None:
    """With evaluation after each step: while no batch follows, none is prepared."""
    dynamic, batches = Dynamic(eviction=LFU()), iter(BATCHES["fixed"])
    iterators = [[next(batches) for _ in range(length)] for length in lengths]
    expected, model = Ranker(dynamic, 24), Ranker(dynamic, 24)
    losses = by_hand(expected, [batch for of_one in iterators for batch in of_one])
    is_native = picked_kernel("insert_keys", "cpu") == "native"
    found, seen = [], BATCHES["fixed"][-1]
    with taped_captures() if is_native else contextlib.nullcontext():
        pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)
        for of_one in iterators:
            iterator = iter(of_one)
            for _ in of_one:
                found.append(pipeline.progress(iterator).loss.item())
                model.eval()(seen.dense, seen.sparse)
                model.train()
    assert found == losses
    assert_same_state(model, state_of(expected))


def test_pipelines_and_loops_take_turns() -> None:
    """Each counts its own batches; the tables go on counting."""
    batches = BATCHES["fixed"]
    expected, model = Ranker(Dynamic(), 24), Ranker(Dynamic(), 24)
    losses = by_hand(expected, batches)
    optimizers = optimizers_of(model)
    found = []
    for first in (0, 6):
        pipeline = TrainPipeline(model, LOSS, optimizers, device=CPU, capture=True)
        found += results_of(pipeline, batches[first : first + 5])
        found.append(step_by_hand(model, LOSS, optimizers, batches[first + 5]).item())
    found += [step_by_hand(model, LOSS, optimizers, batch).item() for batch in batches[12:]]
    assert found == losses
    assert_same_state(model, state_of(expected))


def test_rows_expire_by_the_clock_in_captured_steps() -> None:
    """Its host asks the clock between steps, which replays do not."""
    seconds = iter(range(1000))
    dynamic = Dynamic(ttl_seconds=4.0, clock=lambda: float(next(seconds)), sweep_steps=2)
    model = Ranker(dynamic, 200)
    with (
        taped_captures()
        if picked_kernel("insert_keys", "cpu") == "native"
        else contextlib.nullcontext()
    ):
        pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)
        results_of(pipeline, BATCHES["fixed"])
    state, clock = index_of(model).hash_tables, index_of(model).clock
    assert state.counters[0, Counter.EVICTED_EXPIRED] > 0
    oldest = state.touched[state.digests > 0].min()
    assert clock.last - 10 < oldest < clock.last - 2
