"""The best of the trainings of several seeds."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import nn

from recipes.ctr.config import EarlyStoppedConfig
from recipes.served_run import no_checkpoint
from torchembed.training import CheckpointFolder, EarlyStop, TrainingRun


class BestSeed(NamedTuple):
    """The training of a run that got the best score on the validation rows.

    Attributes:
        seed: of the training.
        checkpoints: the folder of its best checkpoint.
    """

    seed: int
    checkpoints: Path


def best_seed(
    config: EarlyStoppedConfig, build_model: Callable[[int], nn.Module], output: Path
) -> BestSeed:
    """The best training of those that have come to an evaluation.

    Args:
        build_model: from a seed to the model that was trained.
        output: of the run, with a folder of each seed.

    Raises:
        FileNotFoundError: where none has.
    """
    scores: dict[int, float] = {}
    for seed in config.seeds:
        saved, early_stop = CheckpointFolder(output / f"seed-{seed}" / "newest"), EarlyStop()
        if saved.steps():
            saved.load(TrainingRun(model=build_model(seed), others={"early_stop": early_stop}))
        if early_stop.best_auc is not None:
            scores[seed] = early_stop.best_auc
    if not scores:
        raise no_checkpoint(output)
    best = max(scores, key=scores.__getitem__)
    return BestSeed(best, output / f"seed-{best}" / "checkpoint")
