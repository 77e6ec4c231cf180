"""The best of the trainings of several seeds."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from recipes.served_run import no_checkpoint
from torchembed.training import CheckpointFolder, EarlyStop


class BestSeed(NamedTuple):
    """The training of a run that got the best score on the validation rows.

    Attributes:
        seed: of the training.
        checkpoints: the folder of its best checkpoint.
    """

    seed: int
    checkpoints: Path


def best_seed(seeds: Iterable[int], output: Path) -> BestSeed:
    """The best training of those of ``seeds`` that have come to an evaluation.

    Args:
        seeds: of the run.
        output: of the run, with a folder of each seed.

    Raises:
        FileNotFoundError: where none has.
    """
    scores: dict[int, float] = {}
    for seed in seeds:
        early_stop = EarlyStop()
        newest = CheckpointFolder(output / f"seed-{seed}" / "newest")
        newest.load_others({"early_stop": early_stop})
        if early_stop.best_auc is not None:
            scores[seed] = early_stop.best_auc
    if not scores:
        raise no_checkpoint(output)
    best = max(scores, key=scores.__getitem__)
    return BestSeed(best, output / f"seed-{best}" / "checkpoint")
