"""Modules of one table in host memory train as on the device, whatever their cache holds."""

import contextlib

import pytest
import torch

from tests.support.lanes import picked_kernel
from tests.support.stored_modules import (
    NUM_IDS,
    StoredModules,
    batches,
    largest_batch,
    train_by_hand,
)
from tests.support.tape import taped_captures
from tests.support.tiny_training import assert_same_state, results_of, state_of
from torchembed import Dynamic, Embedding, EmbeddingBag, HostMemory
from torchembed.ops.row_cache import CacheCounter
from torchembed.optim import SGD, Adagrad, Adam
from torchembed.training import TrainPipeline

NUM_STEPS = 12
CACHE_ROWS = largest_batch(batches(NUM_STEPS))


def num_refused(model: StoredModules) -> int:
    caches = [module.table_set.tables[0].group.cache for module in model.tables]
    return sum(int(cache.counters[CacheCounter.REFUSED_BATCHES]) for cache in caches)


@pytest.mark.parametrize("cache_rows", [CACHE_ROWS, NUM_IDS])
@pytest.mark.parametrize(
    ("way", "kind", "dtype"),
    [
        ("by hand", Adam, torch.float32),
        ("eager", Adagrad, torch.float32),
        ("eager", SGD, torch.bfloat16),
        ("captured", Adam, torch.float32),
        ("captured", SGD, torch.float32),
        ("taped", Adam, torch.float32),
    ],
)
def test_modules_equal_those_on_the_device(
    way: str, kind: type[Adam], dtype: torch.dtype, cache_rows: int
) -> None:
    if way == "taped" and picked_kernel("claim_slots", "cpu") != "native":
        pytest.skip("a tape refuses the reference of claim_slots, which is the host's own work")
    expected = StoredModules(None, dtype=dtype)
    losses = train_by_hand(expected, batches(NUM_STEPS), kind)
    model = StoredModules(HostMemory(cache_rows=cache_rows), dtype=dtype)
    if way == "by hand":
        assert train_by_hand(model, batches(NUM_STEPS), kind) == losses
        assert not num_refused(model)
    else:
        optimizer = kind.with_dense(model.parameters(), lr=0.05)
        of = batches(NUM_STEPS)
        with (
            taped_captures() if way == "taped" else contextlib.nullcontext(),
            TrainPipeline(model, None, [optimizer], device="cpu", capture=way != "eager") as steps,
        ):
            found = [steps.progress(of).loss.item() for _ in range(NUM_STEPS)]
            assert ("graph" in map(str, steps.kinds)) is (way != "eager")
        assert found == losses
        assert (num_refused(model) > 0) is (way != "eager" and cache_rows < NUM_IDS)
    assert_same_state(model, state_of(expected))


@pytest.mark.parametrize("capture", [None, False, True], ids=["by hand", "eager", "captured"])
def test_dynamic_modules_equal_those_on_the_device(capture: bool | None) -> None:
    expected = StoredModules(None, dynamic=Dynamic())
    losses = train_by_hand(expected, batches(NUM_STEPS))
    model, of = (
        StoredModules(HostMemory(cache_rows=CACHE_ROWS), dynamic=Dynamic()),
        batches(NUM_STEPS),
    )
    if capture is None:
        assert train_by_hand(model, of) == losses
    else:
        optimizer = Adam.with_dense(model.parameters(), lr=0.05)
        with TrainPipeline(model, None, [optimizer], device="cpu", capture=capture) as steps:
            assert [steps.progress(of).loss.item() for _ in range(NUM_STEPS)] == losses
    assert_same_state(model, state_of(expected))


@pytest.mark.parametrize("way", ["by hand", "eager", "captured"])
def test_a_batch_larger_than_a_cache_is_named_and_changes_nothing(way: str) -> None:
    def make(storage: HostMemory | None) -> StoredModules:
        model = StoredModules(None)
        # Called last, when others have fetched their rows.
        model.tables[4] = EmbeddingBag(NUM_IDS, 4, mode="sum", seed=4, storage=storage)
        return model

    large = 5
    of = [dict(batch) for batch in batches(8)]
    for number, batch in enumerate(of):
        count = 6 if number == large else 4
        batch["list"] = (torch.arange(9) % count + number) % NUM_IDS
        batch["offsets"] = torch.tensor([0, 0, 4, 6])
    expected, model = make(None), make(HostMemory(cache_rows=5))
    train_by_hand(expected, iter(of[:large]))
    message = "tables weight share a cache of 5 rows on the device, and a batch uses 1 more"
    if way == "by hand":
        with pytest.raises(RuntimeError, match=message):
            train_by_hand(model, iter(of))
    else:
        optimizer = Adam.with_dense(model.parameters(), lr=0.05)
        pipeline = TrainPipeline(model, None, [optimizer], device="cpu", capture=way == "captured")
        with pytest.raises(RuntimeError, match=message):
            results_of(pipeline, of)
    assert_same_state(model, state_of(expected))


def test_evaluation_and_lookup_read_rows_wherever_they_are_and_move_none() -> None:
    expected, model = StoredModules(None), StoredModules(HostMemory(cache_rows=CACHE_ROWS))
    for trained in (expected, model):
        train_by_hand(trained, batches(3))
        trained.eval()
    caches = [module.table_set.tables[0].group.cache for module in model.tables]
    before = [tensor.clone() for cache in caches for tensor in cache]
    with torch.no_grad():
        for batch in batches(6):
            assert torch.equal(model(batch), expected(batch))
            for ours, theirs in zip(model.tables, expected.tables, strict=True):
                found, wanted = (module.lookup(batch["ids"]) for module in (ours, theirs))
                assert torch.equal(found.vectors, wanted.vectors)
    after = [tensor for cache in caches for tensor in cache]
    assert all(map(torch.equal, before, after))


def test_pretrained_rows_become_those_in_host_memory() -> None:
    rows, storage = torch.randn(6, 3), HostMemory(cache_rows=4)
    for kind in (Embedding, EmbeddingBag):
        module = kind.from_pretrained(rows, freeze=False, storage=storage)
        assert module.weight.data_ptr() == rows.data_ptr()
        optimizer = SGD(module.parameters(), lr=1.0)
        ids = torch.tensor([[1, 3], [0, 3]])
        module(ids).sum().backward()
        optimizer.step()
        assert torch.equal(module.to_torch()(ids), module(ids).detach())
