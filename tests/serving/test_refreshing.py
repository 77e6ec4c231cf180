"""Refreshes of caches: rows that another server wrote are answered after a while."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import torchembed
from tests.support.served_lookups import options_over
from torchembed.serving.configuration import CacheConfig
from torchembed.serving.models import ModelRepository, deploy
from torchembed.serving.server.refreshing import Refresher
from torchembed.stores import MemoryStore

LIMIT_SECONDS = 60.0
NUM_ROWS, DIM = 4, 2
CONFIG = CacheConfig(refresh_share=1.0, refresh_interval_seconds=0.01)


@pytest.mark.parametrize("store_name", [None, "common/items"])
def test_rows_of_a_model_are_read_again(store_name: str | None, tmp_path: Path) -> None:
    model = nn.Sequential(torchembed.EmbeddingBag(NUM_ROWS, DIM, mode="sum"))
    shared = {} if store_name is None else {"0": store_name}
    examples = torch.zeros(2, 1, dtype=torch.int64)
    deploy(model, tmp_path, name="m", version=1, examples=examples, store_names=shared)
    request = {"input": np.arange(NUM_ROWS).reshape(-1, 1)}
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        repository.start()
        served = repository.model("m")
        served.answer(request)
        rows = torch.full((NUM_ROWS, DIM), 7.0)
        table = store.table(store_name or "m/0", DIM * 4)
        table.write(torch.arange(NUM_ROWS), rows.view(torch.uint8))
        assert (served.answer(request).outputs["output"] != 7.0).any()
        deadline = time.monotonic() + LIMIT_SECONDS
        with Refresher(repository, "m", CONFIG):
            while (served.answer(request).outputs["output"] != 7.0).any():
                assert time.monotonic() < deadline
    assert repository.lookups_of("m") == repository.lookups_of("other") == {}
