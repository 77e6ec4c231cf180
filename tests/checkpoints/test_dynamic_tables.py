"""Checkpoints of runs with dynamic tables."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers
from torchembed import LFU, Dynamic, EmbeddingBagConfig, MinimumCount
from torchembed.training import CheckpointFolder, TrainingRun, TrainPipeline, train

POLICIES = {
    "lru": Dynamic(),
    "lfu": Dynamic(eviction=LFU(), admission=MinimumCount(2)),
}


def new_run(
    dynamic: Dynamic | None, capacity: int = 12, dtype: torch.dtype = torch.float32
) -> TrainingRun:
    """Tables of fewer rows than there are ids, which evict all the time."""

    def config(*, num_embeddings: int, **others: Any) -> EmbeddingBagConfig:
        rows = num_embeddings if dynamic is None else capacity
        return EmbeddingBagConfig(num_embeddings=rows, dynamic=dynamic, dtype=dtype, **others)

    model = TinyModel(is_deep=True, config=config)  # type: ignore[arg-type]
    return TrainingRun(model=model, optimizers=make_optimizers(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_training_goes_on_as_if_it_had_not_stopped(
    policy: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Which ids have rows, and how 16-bit rows are rounded, too."""
    kept, loaded = (new_run(POLICIES[policy], dtype=dtype) for _ in range(2))
    batches = fixed_batches(12)
    loss = F.binary_cross_entropy_with_logits
    pipeline = functools.partial(TrainPipeline, loss_fn=loss, device=torch.device("cpu"))
    train(pipeline(kept.model, optimizers=kept.optimizers, capture=True), batches[:7])
    CheckpointFolder(tmp_path).save(7, kept)
    train(pipeline(loaded.model, optimizers=loaded.optimizers), batches[9:11])
    assert CheckpointFolder(tmp_path).load(loaded) == 7
    for run in (kept, loaded):
        train(pipeline(run.model, optimizers=run.optimizers, capture=True), batches[7:])
    for name, value in kept.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value), name


def test_checkpoints_of_other_tables_change_nothing(tmp_path: Path) -> None:
    """Of static tables, of another capacity, and of another policy, which has scores."""
    CheckpointFolder(tmp_path / "static").save(1, new_run(None))
    CheckpointFolder(tmp_path / "larger").save(1, new_run(Dynamic(), capacity=13))
    CheckpointFolder(tmp_path / "lfu").save(1, new_run(Dynamic(eviction=LFU())))
    for name in ("static", "larger", "lfu"):
        run = new_run(Dynamic())
        before = {key: value.clone() for key, value in run.model.state_dict().items()}
        with pytest.raises(ValueError, match=r"embedding_bags\.f0"):
            CheckpointFolder(tmp_path / name).load(run)
        for key, value in run.model.state_dict().items():
            assert torch.equal(value, before[key]), key
