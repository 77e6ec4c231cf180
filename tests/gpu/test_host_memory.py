"""Tables in host memory on a GPU: captured steps train what tables on the GPU train."""

import itertools
from typing import Any

import pytest
import torch

from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers
from tests.support.tiny_training import LOSS, assert_same_state, results_of, state_of
from tests.support.tolerance import assert_same_bits
from torchembed import (
    Dynamic,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    HostMemory,
)
from torchembed.data import Batch
from torchembed.tables import Constant, Initializer, Normal, Uniform
from torchembed.tables.tiers import host_tensor
from torchembed.tables.tiers.host_group import _FILLED_ELEMENTS
from torchembed.training import TrainPipeline

pytestmark = pytest.mark.gpu

NUM_BATCHES = 40


def cache_rows(batches: list[Batch], num_batches: int) -> int:
    """Rows for each of two tables, which share them, that hold any so many batches in a row."""
    of_tables = [batch.sparse.values.split([16, 24]) for batch in batches]
    counts = [
        sum(torch.cat(ids).unique().numel() for ids in zip(*of_tables[first:last], strict=True))
        for first, last in zip(
            itertools.count(), range(num_batches, len(batches) + 1), strict=False
        )
    ]
    return -(-max(counts) // 2)


def make_model(
    device: torch.device, storage: HostMemory | None, dynamic: Dynamic | None, dtype: torch.dtype
) -> TinyModel:
    def config(**fields: Any) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(storage=storage, dynamic=dynamic, dtype=dtype, **fields)

    return TinyModel(is_deep=True, config=config).to(device)


def test_a_gpu_reads_and_writes_memory_of_the_host(device: torch.device) -> None:
    memory = host_tensor((3, 5), torch.float32, device)
    assert memory.is_pinned()
    memory.copy_(torch.arange(15.0).view(3, 5))
    assert torch.equal(memory.to(device).cpu(), memory)


NUM_ROWS = _FILLED_ELEMENTS // 64 + 5
"""More than a GPU fills at a time."""


@pytest.mark.parametrize("initializer", [Uniform(), Normal(), Constant(value=2.0)], ids=repr)
def test_initial_rows_are_those_of_tables_on_the_gpu(
    device: torch.device, initializer: Initializer
) -> None:
    def weight(storage: HostMemory | None) -> torch.Tensor:
        config = EmbeddingBagConfig(
            name="table",
            embedding_dim=64,
            num_embeddings=NUM_ROWS,
            feature_names=("feature",),
            initializer=initializer,
            storage=storage,
        )
        return next(EmbeddingBagCollection([config], device=device).parameters()).detach()

    held = weight(HostMemory(cache_rows=7))
    assert held.device.type == "cpu"
    assert_same_bits(held, weight(None).cpu())


def test_a_row_of_zeros_is_that_of_tables_on_the_gpu(device: torch.device) -> None:
    def made(storage: HostMemory | None) -> EmbeddingBag:
        torch.manual_seed(1)
        return EmbeddingBag(NUM_ROWS, 64, padding_idx=NUM_ROWS - 2, storage=storage, device=device)

    held, near = made(HostMemory(cache_rows=7)), made(None)
    assert_same_bits(held.weight.detach(), near.weight.detach().cpu())
    assert not held.weight[NUM_ROWS - 2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dynamic", [None, Dynamic()], ids=["static", "dynamic"])
@pytest.mark.parametrize("num_cached", [1, 2], ids=["one batch", "two batches"])
def test_captured_steps_equal_those_with_all_rows_on_the_gpu(
    device: torch.device, num_cached: int, dynamic: Dynamic | None, dtype: torch.dtype
) -> None:
    """With a cache of the rows of one batch, whose next one is fetched at the beginning of its
    step, or of two."""
    batches = fixed_batches(NUM_BATCHES)
    expected = make_model(device, None, dynamic, dtype)
    pipeline = TrainPipeline(expected, LOSS, make_optimizers(expected), device=device)
    losses = results_of(pipeline, batches)
    storage = HostMemory(cache_rows=cache_rows(batches, num_cached))
    model = make_model(device, storage, dynamic, dtype)
    pipeline = TrainPipeline(model, LOSS, make_optimizers(model))
    assert pipeline.device.type == "cuda"
    assert results_of(pipeline, batches) == losses
    assert_same_state(model, state_of(expected))
    num_graphs = sum(count for kind, count in pipeline.kinds.items() if kind.form == "graph")
    assert num_graphs >= NUM_BATCHES - 8
    assert not any(parameter.is_cuda for parameter in model.tables.parameters())
    (statistics,) = model.tables.cache_statistics(wait=True).values()
    assert bool(statistics.batches_fetched_late) == (num_cached == 1)


def test_a_batch_larger_than_the_cache_is_named(device: torch.device) -> None:
    batches = fixed_batches(NUM_BATCHES)
    model = make_model(device, HostMemory(cache_rows=2), None, torch.float32)
    pipeline = TrainPipeline(model, LOSS, make_optimizers(model), device=device)
    with pytest.raises(RuntimeError, match="tables f0, f1 share a cache of 4 rows on the device"):
        results_of(pipeline, batches)
