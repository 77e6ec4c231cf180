"""Checkpoints of runs with tables in host memory."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers
from tests.support.tiny_training import assert_same_state, state_of
from torchembed import Dynamic, EmbeddingBagConfig, HostMemory
from torchembed.training import CheckpointFolder, TrainingRun, TrainPipeline, train

NUM_BATCHES, NUM_SAVED = 12, 7
PIPELINE = functools.partial(
    TrainPipeline, loss_fn=F.binary_cross_entropy_with_logits, device=torch.device("cpu")
)
PLACES = {
    "device": None,
    "small cache": HostMemory(cache_rows=60),
    "cache": HostMemory(cache_rows=99),
}
CASES = [
    ("small cache", "small cache", torch.bfloat16),
    ("small cache", "cache", torch.float32),
    ("small cache", "device", torch.bfloat16),
    ("device", "small cache", torch.float32),
]


def new_run(place: str, dynamic: Dynamic | None, dtype: torch.dtype) -> TrainingRun:
    def config(*, num_embeddings: int, **others: Any) -> EmbeddingBagConfig:
        rows = num_embeddings if dynamic is None else 40
        return EmbeddingBagConfig(
            num_embeddings=rows, dynamic=dynamic, dtype=dtype, storage=PLACES[place], **others
        )

    model = TinyModel(is_deep=True, config=config)
    return TrainingRun(model=model, optimizers=make_optimizers(model))


@pytest.mark.parametrize("dynamic", [None, Dynamic()], ids=["static", "dynamic"])
@pytest.mark.parametrize(("saved", "loaded", "dtype"), CASES)
def test_training_goes_on_as_if_it_had_not_stopped(
    saved: str, loaded: str, dynamic: Dynamic | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    """With the rows where the new run has them."""
    kept = new_run(saved, dynamic, dtype)
    batches = fixed_batches(NUM_BATCHES)
    train(PIPELINE(kept.model, optimizers=kept.optimizers, capture=True), batches[:NUM_SAVED])
    CheckpointFolder(tmp_path).save(NUM_SAVED, kept)
    resumed = new_run(loaded, dynamic, dtype)
    assert CheckpointFolder(tmp_path).load(resumed) == NUM_SAVED
    for run in (kept, resumed):
        train(PIPELINE(run.model, optimizers=run.optimizers, capture=True), batches[NUM_SAVED:])
    assert_same_state(resumed.model, state_of(kept.model))
    for one, other in zip(kept.optimizers, resumed.optimizers, strict=True):
        states = (tree_leaves(optimizer.state_dict()["state"]) for optimizer in (one, other))
        for value, wanted in zip(*states, strict=True):
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(wanted))
