"""Runs of a tiny model whose tables are on disk, in host memory or on the device."""

import functools
import resource
import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.tiny_model import KEYS, TinyModel, fixed_batches, make_optimizers
from torchembed import Disk, Dynamic, EmbeddingBagConfig, HostMemory
from torchembed.checkpoints import model_rows
from torchembed.training import CheckpointFolder, TrainingRun, TrainPipeline, train

PIPELINE = functools.partial(
    TrainPipeline, loss_fn=F.binary_cross_entropy_with_logits, device=torch.device("cpu")
)


def storage_of(place: str, folder: Path) -> HostMemory | Disk | None:
    """The storage of tables on the device, in host memory or on disk, in ``folder`` then."""
    folder.mkdir(exist_ok=True)
    return {
        "device": None,
        "host": HostMemory(cache_rows=60),
        "small disk": Disk(path=folder, host_rows=62, cache_rows=60),
        "disk": Disk(path=folder, host_rows=99, cache_rows=80),
    }[place]


def new_run(
    place: str,
    folder: Path,
    dynamic: Dynamic | None,
    dtype: torch.dtype = torch.float32,
    capacity: int = 40,
) -> TrainingRun:
    """With tables in a place that :func:`storage_of` knows; dynamic ones of a ``capacity``."""

    def config(*, num_embeddings: int, **others: Any) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            num_embeddings=num_embeddings if dynamic is None else capacity,
            dynamic=dynamic,
            dtype=dtype,
            storage=storage_of(place, folder),
            **others,
        )

    model = TinyModel(is_deep=True, config=config)
    return TrainingRun(model=model, optimizers=make_optimizers(model))


def trained(run: TrainingRun, batches: list[Any]) -> TrainingRun:
    """The run, after these batches."""
    train(PIPELINE(run.model, optimizers=run.optimizers, capture=True), batches)
    return run


def rows_of(run: TrainingRun) -> dict[str, Tensor]:
    """All rows, states, ids, scores and last uses of the tables, in the order of ids."""
    found = {}
    for key in KEYS:
        name = f"tables.embedding_bags.{key}.weight"
        chunks = list(model_rows(run.model, name))
        keys = torch.cat([chunk.keys for chunk in chunks])
        order = keys.argsort()
        parts = {"keys": keys[order]}
        parts["rows"] = torch.cat([chunk.rows for chunk in chunks])[order]
        for state in chunks[0].states:
            parts[state] = torch.cat([chunk.states[state] for chunk in chunks])[order]
        if chunks[0].touched is not None:
            parts["touched"] = torch.cat([chunk.touched for chunk in chunks])[order]
        found |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    return found


def told_by(action: Callable[[], object]) -> str:
    """What an action that fails says."""
    try:
        action()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__} {error}"
    return "it does not fail"


def save_up_to_a_limit(messages: Connection, folder: Path, limit_bytes: int) -> None:
    """:func:`_save_twice`, where files may not grow further before the second time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))

    _save_twice(messages, folder, lambda: limit(limit_bytes), lambda: limit(soft))


def save_from_a_folder_that_is_gone(messages: Connection, folder: Path) -> None:
    """:func:`_save_twice`, where the folder of the database is removed before the second time."""
    _save_twice(messages, folder, lambda: shutil.rmtree(folder / "disk"), lambda: None)


def _save_twice(
    messages: Connection, folder: Path, before: Callable[[], object], after: Callable[[], object]
) -> None:
    """Save a run, train it on and save it again, between ``before`` and ``after``. Sends what the
    second time says, the steps that are there then, that from which a new run goes on, and whether
    it has the rows of the first."""
    torch.set_num_threads(1)
    run = trained(new_run("disk", folder / "disk", None), fixed_batches(4))
    checkpoints = CheckpointFolder(folder / "run")
    checkpoints.save(4, run)
    saved = rows_of(run)
    trained(run, fixed_batches(6)[4:])
    before()
    told = told_by(lambda: checkpoints.save(6, run))
    after()
    steps, other = checkpoints.steps(), new_run("disk", folder / "other", None)
    found, rows = checkpoints.load(other), rows_of(other)
    is_same = all(torch.equal(rows[name], tensor) for name, tensor in saved.items())
    messages.send((told, steps, found, is_same))
