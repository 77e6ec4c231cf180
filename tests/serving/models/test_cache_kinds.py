"""Models that are served from caches of each kind, as a server's configuration says."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchembed
from torchembed.serving.configuration import CacheConfig, ModelConfig
from torchembed.serving.levels import CacheKind, LookupStatistics
from torchembed.serving.levels.level_rules import LevelRules
from torchembed.serving.models import ModelRepository, deploy
from torchembed.serving.server.lookups import model_options
from torchembed.serving.server.stores import StoreStack
from torchembed.stores import MemoryStore, RocksDBStore, RowStore
from torchembed.stores.volatile.memory_bytes import volatile_memory_bytes

NUM_ROWS, DIM = 300, 4


class Sums(nn.Module):
    """Answers by the rows of ids alone, all elements of which are the model's number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.items = torchembed.EmbeddingBag(NUM_ROWS, DIM, mode="sum")
        with torch.no_grad():
            self.items.weight.fill_(number)

    def forward(self, ids: Tensor) -> Tensor:
        return self.items(ids)


IDS = {"ids": np.arange(NUM_ROWS).reshape(-1, 1)}


def deploy_sums(folder: Path, version: int) -> None:
    examples = torch.zeros(2, 1, dtype=torch.int64)
    deploy(Sums(version), folder, name="m", version=version, examples=examples)


def repository_over(
    folder: Path, store: RowStore, kind: CacheKind, records: RowStore | None = None
) -> ModelRepository:
    config = ModelConfig(name="m", batching=None, cache=CacheConfig(kind=kind, devices=("cpu",)))
    stack = StoreStack(("store",), (store,), (LevelRules(),), volatile_memory_bytes, records)
    options = model_options(config, stack)
    return ModelRepository(folder, options, records=records)


def answered(repository: ModelRepository) -> tuple[list[float], int]:
    answer = repository.model("m").answer(IDS)
    (rows,) = (array for name, array in answer.outputs.items() if name != "default_rows")
    return np.unique(rows).tolist(), answer.num_default_rows


def counts(repository: ModelRepository) -> LookupStatistics:
    (found,) = repository.lookups().values()
    return found.statistics()


def test_versions_of_a_static_model_have_rows_of_their_own_and_no_updates(tmp_path: Path) -> None:
    deploy_sums(tmp_path, 1)
    with MemoryStore() as store, repository_over(tmp_path, store, CacheKind.STATIC) as repository:
        repository.start()
        assert answered(repository) == ([1.0], 0)
        deploy_sums(tmp_path, 2)
        repository.load("m")
        assert answered(repository) == ([2.0], 0)
        assert repository.roll_back("m") == "1"
        assert answered(repository) == ([1.0], 0)
        rows = torch.zeros(1, DIM), torch.tensor([5])
        with pytest.raises(
            ValueError, match=r"^table 'm/items@1' must be in a cache that takes up"
        ):
            repository.apply_rows("m", "items", rows[1], rows[0], version=1)
        assert answered(repository) == ([1.0], 0)
        repository.unload("m")
        repository.load("m")
        assert answered(repository) == ([2.0], 0)
        assert not store.tables()


def test_a_model_of_whole_tables_in_the_host_comes_back_with_its_updates(tmp_path: Path) -> None:
    pytest.importorskip("rocksdict", reason="RocksDB needs rocksdict: not installed")
    models = tmp_path / "models"
    deploy_sums(models, 1)
    with (
        RocksDBStore(tmp_path / "rows") as store,
        repository_over(models, store, CacheKind.UVM, store) as repository,
    ):
        repository.start()
        assert answered(repository) == ([1.0], 0)
        repository.apply_rows(
            "m", "items", torch.arange(NUM_ROWS), torch.full((NUM_ROWS, DIM), 7.0), version=1
        )
        assert answered(repository) == ([7.0], 0)
        assert counts(repository).num_missed_ids == 0
    with (
        RocksDBStore(tmp_path / "rows") as store,
        repository_over(models, store, CacheKind.UVM, store) as repository,
    ):
        repository.start()
        assert answered(repository) == ([7.0], 0)
        assert counts(repository).num_missed_ids == 0
