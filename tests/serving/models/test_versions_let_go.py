"""What versions leave behind that came and went: nothing."""

import gc
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchembed
from torchembed.modules.served_names import dense_tensors
from torchembed.serving.levels import EmbeddingCache, LeveledLookup, RowLevels, ServedTable
from torchembed.serving.models import ModelOptions, ModelRepository, deploy
from torchembed.stores import RocksDBStore, VolatileMemoryStore

pytest.importorskip("rocksdict")

NUM_ROWS, DIM = 200, 4
IDS = torch.arange(32).view(32, 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = torchembed.EmbeddingBag(NUM_ROWS, DIM, mode="sum")
        self.deep = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.deep(self.items(ids))


def live_objects() -> Counter[type]:
    """The objects of the library's own classes, and tensors."""
    gc.collect()
    kinds = (type(found) for found in gc.get_objects())
    # Of some classes the module is a descriptor.
    return Counter(k for k in kinds if k is Tensor or str(k.__module__).startswith("torchembed."))


def test_versions_that_are_let_go_of_leave_nothing_behind(tmp_path: Path) -> None:
    model = Model()
    keys, rows = torch.arange(NUM_ROWS), torch.ones(NUM_ROWS, DIM)
    with VolatileMemoryStore() as memory, RocksDBStore(tmp_path / "stored") as disk:

        def make(tables: Mapping[ServedTable, int]) -> LeveledLookup:
            # Lookups do not wait for rows that they miss, which are inserted behind them.
            cache = EmbeddingCache(list(tables), num_rows=NUM_ROWS)
            levels = RowLevels([memory, disk], list(tables))
            return LeveledLookup(cache, levels, hit_rate_threshold=0.0)

        options = ModelOptions(make_lookup=make, rows_by_version=True)
        found: list[Counter[type]] = []
        with ModelRepository(tmp_path, options, models={"m": options}, records=disk) as repository:
            for version in range(1, 9):
                deploy(model, tmp_path, name="m", version=version, examples=IDS)
                repository.load("m")
                repository.model("m").answer({"ids": IDS.numpy()})
                repository.apply_rows("m", "items", keys, rows, version=version)
                repository.swap_dense("m", dense_tensors(model), version)
                repository.model("m").answer({"ids": IDS.numpy()})
                for lookup in repository.lookups().values():
                    lookup.wait_for_insertions()
                memory.sync()
                found.append(live_objects())
        # Two versions are loaded from the second on; a third one shows what was made once.
        assert found[-1] - found[3] == found[3] - found[-1] == Counter()
        assert set(memory.tables()) == {"m/items@7", "m/items@8"}
        records = {"torchembed.loaded_rows", "torchembed.loaded_contents"}
        assert set(disk.tables()) == {"m/items@7", "m/items@8", *records}
        assert {disk.table(name, 8).num_rows() for name in records} == {2}
