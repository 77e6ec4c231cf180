"""MovieLens-1M as two tasks: does a user like a movie, and how many stars does it get?

All ratings count; 4 and 5 are likes. Rows are divided at random, 8 : 1 : 1, anew for each seed. The
features are those of the recipe ctr-ml1m.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from recipes.ctr import ml1m
from recipes.ctr.rows import Rows
from recipes.data_folder import check_data, find_data
from recipes.result import Stopped, TasksResult
from recipes.served_run import ServedRun
from recipes.tasks.config import Architecture, TasksConfig
from recipes.tasks.run import chosen_tasks, run_seeds, served_tasks
from torchembed.training import Task, TaskKind

TASKS = (Task(name="like", kind=TaskKind.BINARY), Task(name="rating", kind=TaskKind.REGRESSION))


def shared_bottom(data: str | Path | None = None) -> TasksConfig:
    """A shared bottom on MovieLens-1M, likes and ratings, mean of three seeds.

    The data are GroupLens' ml-1m as published: ratings.dat (UserID::MovieID::Rating::Timestamp),
    users.dat (UserID::Gender::Age::Occupation::Zip-code) and movies.dat (MovieID::Title::Genres),
    in --data or in a folder ml-1m there. Read as well, in place of ratings.dat: ratings.npz with
    arrays user, movie and rating. --tasks like, or rating, trains a model of one task.
    """
    return TasksConfig(data=data, architecture=Architecture.SHARED_BOTTOM)


def mmoe(data: str | Path | None = None) -> TasksConfig:
    """MMoE on MovieLens-1M, likes and ratings, mean of three seeds.

    The data are those of shared-bottom.
    """
    return TasksConfig(data=data, architecture=Architecture.MMOE)


def ple(data: str | Path | None = None) -> TasksConfig:
    """PLE on MovieLens-1M, likes and ratings, mean of three seeds.

    The data are those of shared-bottom.
    """
    return TasksConfig(data=data, architecture=Architecture.PLE)


def check(config: TasksConfig, num_ranks: int) -> None:
    """Look for the tasks and the files; raises as :func:`~recipes.tasks.run.chosen_tasks` and
    :func:`~recipes.data_folder.check_data`."""
    chosen_tasks(config, TASKS)
    check_data(ml1m.FILES, config, num_ranks)


def run(config: TasksConfig, device: torch.device, output: Path) -> TasksResult | Stopped:
    """Train on random divisions of the ratings."""
    tasks = chosen_tasks(config, TASKS)
    rows = _read(config, tasks)
    return run_seeds(config, tasks, lambda seed: ml1m.divide(rows, seed), device, output)


def served(config: TasksConfig, output: Path) -> ServedRun:
    """The best seed's model, asked of test rows."""
    tasks = chosen_tasks(config, TASKS)
    rows = _read(config, tasks)
    return served_tasks(config, tasks, lambda seed: ml1m.divide(rows, seed), output)


def _read(config: TasksConfig, tasks: Sequence[Task]) -> Rows:
    """All ratings, with the labels of the tasks."""
    rated = ml1m.read_rated(find_data(ml1m.FILES, config.data))
    of_tasks = {"like": (rated.labels >= 4).float(), "rating": rated.labels}
    labels = {task.name: of_tasks[task.name] for task in tasks}
    return dataclasses.replace(rated, labels=labels)
