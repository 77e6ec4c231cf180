"""Training once for each seed."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from recipes.result import Stopped

R = TypeVar("R")


def train_each_seed(
    seeds: Iterable[int], train_seed: Callable[[int, Path], R | Stopped], output: Path
) -> dict[int, R] | Stopped:
    """Train once for each seed; gives each one's run, or the first that a signal ended.

    Args:
        seeds: in the order of their trainings.
        train_seed: from a seed and its folder to its run.
        output: for a folder of each seed.
    """
    runs: dict[int, R] = {}
    for seed in seeds:
        run = train_seed(seed, output / f"seed-{seed}")
        if isinstance(run, Stopped):
            return run
        runs[seed] = run
    return runs
