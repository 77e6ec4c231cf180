"""What processes do with tables on disk, for tests of faults."""

import itertools
import resource
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.support.disk_tables import (
    LOSS,
    StoredRanker,
    batches,
    disk_groups_of,
    optimizers_of,
)
from torchembed import Disk
from torchembed.training import TrainPipeline

SIZES = {"cache_rows": 20, "host_rows": 40}


def train_until_killed(messages: Connection, path: Path) -> None:
    """Say so once rows are on disk, and train on."""
    model = StoredRanker(Disk(path=path, **SIZES))
    with TrainPipeline(model, LOSS, optimizers_of(model), device="cpu", capture=True) as pipeline:
        of = (one for n in itertools.count() for one in batches("fixed", 1, first=n))
        was_said = False
        while True:
            pipeline.progress(of)
            if not was_said and not any(g.lines.store.is_empty for g in disk_groups_of(model)):
                messages.send(True)
                was_said = True


def train_up_to_a_limit(messages: Connection, path: Path, limit_bytes: int) -> None:
    """Train until files may not grow further; what is said then, and at the steps after it."""
    model = StoredRanker(Disk(path=path, **SIZES))
    told: list[str] = []
    pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device="cpu", capture=True)
    of = (one for n in itertools.count() for one in batches("fixed", 1, first=n))
    pipeline.progress(of)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    while len(told) < 2:
        try:
            pipeline.progress(of)
        except Exception as error:  # noqa: BLE001 - told to the test
            told.append(f"{type(error).__name__} {error}")
    before = [parameter.clone() for parameter in model.dense.parameters()]
    for call in (pipeline.close, model.bags.write_back):
        try:
            call()
        except Exception as error:  # noqa: BLE001 - told to the test
            told.append(f"{type(error).__name__} {error}")
    pairs = zip(before, model.dense.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    messages.send(told)
