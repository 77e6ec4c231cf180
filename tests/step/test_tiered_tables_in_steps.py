"""Tables in host memory in train steps: whatever their cache holds, they train as on the device."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
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
from torchembed import LFU, Dynamic, HashedRows, HostMemory, SparseFeatures
from torchembed.core.random_bits import GOLDEN, signed64
from torchembed.data import Batch
from torchembed.optim import SGD, Adagrad, Adam, RowwiseAdagrad, split_parameters
from torchembed.tables import TieredGroup
from torchembed.training import TrainPipeline

CPU = torch.device("cpu")
KEYS = ("a", "b", "c")
NUM_IDS = 60
LOSS = F.binary_cross_entropy_with_logits
OPTIMIZERS = {kind.__name__: kind for kind in (SGD, Adagrad, RowwiseAdagrad, Adam)}


class Ranker(nn.Module):
    """A logit from pooled vectors of two tables, one of which two features use."""

    def __init__(
        self,
        storage: HostMemory | None,
        *,
        storage_of_b: HostMemory | None = None,
        dynamic: Dynamic | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = torchembed.EmbeddingBagConfig
        self.tables = torchembed.EmbeddingBagCollection(
            [
                config(
                    name="a",
                    num_embeddings=NUM_IDS if dynamic is None else 20,
                    embedding_dim=4,
                    dynamic=dynamic,
                    feature_names=("a", "c"),
                    storage=storage,
                ),
                config(
                    name="b",
                    num_embeddings=NUM_IDS if dynamic is None else 20,
                    embedding_dim=4,
                    dynamic=dynamic,
                    feature_names=("b",),
                    storage=storage_of_b,
                ),
            ]
        )
        self.dense = nn.Sequential(nn.Linear(14, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return self.dense(torch.cat([dense, self.tables(sparse).values()], dim=1))


def optimizers_of(
    model: nn.Module, kind: Callable[..., torch.optim.Optimizer] = Adam
) -> list[torch.optim.Optimizer]:
    tables, dense = split_parameters(model.parameters())
    return [kind(tables, lr=0.05), torch.optim.Adam(dense, lr=0.05)]


def batch(seed: int, *, is_jagged: bool = False, bad: bool = False) -> Batch:
    """A few ids come often, and which they are changes slowly."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([2, 1, 3]).repeat_interleave(8)
    if is_jagged:
        lengths = torch.randint(4, (24,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    skewed = torch.rand(int(offsets[-1]), generator=generator) ** 2 * 20
    ids = (skewed.long() + 3 * seed) % NUM_IDS
    if bad:
        ids[0] = NUM_IDS
    shape: dict[str, Any] = {"offsets": offsets} if is_jagged else {"hotness": (2, 1, 3)}
    sparse = SparseFeatures(keys=KEYS, values=ids, batch_size=8, **shape)
    dense = torch.randint(-2, 3, (8, 2), generator=generator).float()
    return Batch(dense, sparse, (dense[:, 0] > 0).float())


def rows_of(batch: Batch) -> set[int]:
    """The distinct rows of table ``a`` that a batch uses."""
    offsets = batch.sparse.offsets
    offsets = torch.tensor([0, 16, 24, 48]) if offsets is None else offsets[::8]
    first, second, third, last = offsets.tolist()
    return {*batch.sparse.values[first:second].tolist(), *batch.sparse.values[third:last].tolist()}


BATCHES = {
    "fixed": [batch(seed) for seed in range(14)],
    "jagged": [batch(seed, is_jagged=True) for seed in range(14)],
    "mixed": [batch(seed, is_jagged=seed in (5, 6, 11)) for seed in range(18)],
}


def group_of(model: Ranker) -> TieredGroup:
    group = model.tables.table_set.tables[0].group
    assert isinstance(group, TieredGroup)
    return group


def by_hand(
    model: Ranker, batches: Sequence[Batch], kind: Callable[..., torch.optim.Optimizer] = Adam
) -> list[float]:
    optimizers = optimizers_of(model, kind)
    return [step_by_hand(model, LOSS, optimizers, batch).item() for batch in batches]


def largest_batch(batches: Sequence[Batch]) -> int:
    return max(len(rows_of(batch)) for batch in batches)


def largest_pair(batches: Sequence[Batch]) -> int:
    return max(len(rows_of(one) | rows_of(two)) for one, two in itertools.pairwise(batches))


CASES = [
    *(("Adam", form, cache) for form in BATCHES for cache in ("one batch", "two batches", "all")),
    *((optimizer, "mixed", "one batch") for optimizer in ("SGD", "Adagrad", "RowwiseAdagrad")),
]


@pytest.mark.parametrize("is_taped", [False, True], ids=["called", "taped"])
@pytest.mark.parametrize(("optimizer", "form", "cache"), CASES)
def test_captured_steps_equal_those_on_the_device(
    optimizer: str, form: str, cache: str, is_taped: bool
) -> None:
    """With a cache that the largest batch fills to the last slot, and with one that holds it beside
    the batch before."""
    if is_taped and picked_kernel("claim_slots", "cpu") != "native":
        pytest.skip("a tape refuses the reference of claim_slots, which is the host's own work")
    batches, kind = BATCHES[form], OPTIMIZERS[optimizer]
    expected = Ranker(None)
    losses = by_hand(expected, batches, kind)
    sizes = {
        "one batch": largest_batch(batches),
        "two batches": largest_pair(batches),
        "all": NUM_IDS,
    }
    model = Ranker(HostMemory(cache_rows=sizes[cache]))
    with taped_captures() if is_taped else contextlib.nullcontext():
        pipeline = TrainPipeline(model, LOSS, optimizers_of(model, kind), device=CPU, capture=True)
        assert results_of(pipeline, batches) == losses
    assert_same_state(model, state_of(expected))
    counts = model.tables.cache_statistics()[("a",)]
    assert (counts.batches_fetched_late > 0) == (cache == "one batch")
    if cache == "all":
        every = set().union(*map(rows_of, batches))
        assert counts.rows_read == len(every)


@pytest.mark.parametrize("is_taped", [False, True], ids=["called", "taped"])
@pytest.mark.parametrize("form", ["fixed", "mixed"])
def test_dynamic_tables_insert_and_evict_as_on_the_device(form: str, is_taped: bool) -> None:
    """In a table of fewer rows than there are ids, and a cache of fewer than these."""
    if is_taped and picked_kernel("claim_slots", "cpu") != "native":
        pytest.skip("a tape refuses the reference of claim_slots, which is the host's own work")
    batches = [
        batch._replace(
            sparse=dataclasses.replace(batch.sparse, values=batch.sparse.values * signed64(GOLDEN))
        )
        for batch in BATCHES[form]
    ]
    policies = Dynamic(eviction=LFU(), missing=HashedRows(5))
    states = []
    for storage in (None, HostMemory(cache_rows=largest_batch(BATCHES[form]))):
        model = Ranker(storage, storage_of_b=storage, dynamic=policies)
        with taped_captures() if is_taped else contextlib.nullcontext():
            pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)
            states.append((results_of(pipeline, batches), state_of(model)))
    assert states[0][0] == states[1][0]
    assert_same_state(model, states[0][1])
    assert model.tables.statistics()["a"].evicted_full


def test_a_loop_by_hand_equals_that_on_the_device() -> None:
    batches = BATCHES["mixed"]
    expected, model = Ranker(None), Ranker(HostMemory(cache_rows=largest_batch(batches)))
    assert by_hand(model, batches) == by_hand(expected, batches)
    assert_same_state(model, state_of(expected))
    assert not model.tables.cache_statistics()[("a",)].batches_fetched_late


@pytest.mark.parametrize("is_pipeline", [False, True], ids=["by hand", "pipeline"])
def test_a_batch_larger_than_the_cache_is_named_and_changes_nothing(is_pipeline: bool) -> None:
    batches = BATCHES["fixed"]
    num_slots = largest_batch(batches) - 1
    model = Ranker(HostMemory(cache_rows=num_slots))
    largest = next(n for n, b in enumerate(batches) if len(rows_of(b)) > num_slots)
    expected = Ranker(None)
    by_hand(expected, batches[:largest])
    message = (
        f"tables a share a cache of {num_slots} rows on the device, and a batch uses 1 more; "
        "enlarge cache_rows or cache_bytes of their storage by as many rows, or train smaller"
    )
    if is_pipeline:
        pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)
        with pytest.raises(RuntimeError, match=message):
            results_of(pipeline, batches)
    else:
        with pytest.raises(RuntimeError, match=message):
            by_hand(model, batches)
    assert_same_state(model, state_of(expected))


@pytest.mark.parametrize("is_loaded", [False, True], ids=["read", "loaded"])
def test_a_state_dict_between_steps_loses_no_row(is_loaded: bool) -> None:
    """Where the next batch was prepared, and so its rows brought in, before it was taken."""
    batches = BATCHES["fixed"]
    expected, model = Ranker(None), Ranker(HostMemory(cache_rows=largest_pair(batches)))
    losses = by_hand(expected, batches)
    pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)
    iterator, found = iter(batches), []
    for step in range(len(batches)):
        found.append(pipeline.progress(iterator).loss.item())
        if step == 6:
            state = model.state_dict()
            if is_loaded:
                model.load_state_dict({key: value.clone() for key, value in state.items()})
    assert found == losses
    assert_same_state(model, state_of(expected))


def test_a_weight_changes_in_place_after_it_was_written_back() -> None:
    batches = BATCHES["fixed"]
    expected, model = Ranker(None), Ranker(HostMemory(cache_rows=largest_pair(batches)))
    losses = []
    for ranker in (expected, model):
        pipeline = TrainPipeline(ranker, LOSS, optimizers_of(ranker), device=CPU, capture=True)
        iterator = iter(batches)
        for step in range(len(batches)):
            losses.append(pipeline.progress(iterator).loss.item())
            if step == 6:
                ranker.tables.write_back()
                with torch.no_grad():
                    ranker.tables.embedding_bags["a"].weight.mul_(0.5)
    assert losses[: len(batches)] == losses[len(batches) :]
    assert_same_state(model, state_of(expected))


def test_refuses_a_weight_that_changed_under_the_cache() -> None:
    batches = BATCHES["fixed"]
    model = Ranker(HostMemory(cache_rows=NUM_IDS))
    by_hand(model, batches[:1])
    model.tables.write_back()
    by_hand(model, batches[1:2])
    with torch.no_grad():
        model.tables.embedding_bags["a"].weight.mul_(0.5)
    with pytest.raises(
        RuntimeError,
        match="weight of one of the tables a was changed in place while the cache on the device "
        r"held rows of it that were trained since; call write_back\(\) of the module before",
    ):
        model.tables(batches[2].sparse)


def test_refuses_a_backward_without_an_optimizer_of_torchembeds() -> None:
    model = Ranker(HostMemory(cache_rows=NUM_IDS))
    sparse = BATCHES["fixed"][0].sparse
    with torch.no_grad():
        expected = Ranker(None).tables(sparse).values()
    vectors = model.tables(sparse).values()
    assert torch.equal(vectors, expected)
    with pytest.raises(
        RuntimeError,
        match="tables a in host memory or on disk must be trained by an optim",
    ):
        vectors.sum().backward()


def test_evaluation_reads_rows_wherever_they_are_and_moves_none() -> None:
    batches = BATCHES["mixed"]
    expected, model = Ranker(None), Ranker(HostMemory(cache_rows=largest_batch(batches)))
    by_hand(expected, batches[:5])
    by_hand(model, batches[:5])
    before = [tensor.clone() for tensor in group_of(model).cache]
    for ranker in (expected, model):
        ranker.eval()
    with torch.no_grad():
        for batch in batches:
            found, wanted = (ranker(batch.dense, batch.sparse) for ranker in (model, expected))
            assert torch.equal(found, wanted)
            looked_up = model.tables.lookup(batch.sparse)
            assert torch.equal(looked_up.vectors.values(), expected.tables(batch.sparse).values())
    pairs = zip(before, group_of(model).cache, strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_refuses_a_backward_in_evaluation_mode() -> None:
    model = Ranker(HostMemory(cache_rows=NUM_IDS))
    held = optimizers_of(model)
    model.tables.eval()
    vectors = model.tables(BATCHES["fixed"][0].sparse).values()
    with pytest.raises(RuntimeError, match="in training mode, got a backward of a lookup without"):
        vectors.sum().backward()
    del held


def test_frozen_tables_stay_on_the_host() -> None:
    batches, states = BATCHES["fixed"], []
    for storage in (None, HostMemory(cache_rows=1)):
        model = Ranker(storage)
        optimizers = optimizers_of(model)
        model.tables.embedding_bags["a"].weight.requires_grad_(False)
        losses = [step_by_hand(model, LOSS, optimizers, batch).item() for batch in batches[:4]]
        states.append((losses, state_of(model)))
    assert states[0][0] == states[1][0]
    assert_same_state(model, states[0][1])
