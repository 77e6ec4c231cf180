"""Do models of several tasks learn as well as a shared bottom, and as models of one task each?

``python -m bench.training.task_quality --data <folder>`` trains the recipes of several tasks once
for each seed, in processes that share one GPU, and prints the metrics of each run and of the mean.

- On MovieLens-1M the mean AUC of MMoE and PLE may be below that of the shared bottom by 0.0005, and
  below that of a model of likes alone by 0.001.
- On the made set MMoE must have a smaller mean squared error, over both tasks, than a shared bottom
  of as many parameters.

It fails where a mean misses that, or a training fails; ``--max-epochs`` cuts trainings
short, and nothing is required then. ``--output`` is written after each run.
"""

import dataclasses
import functools
import shlex
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

from bench.report.result_file import Row, write_results
from bench.training.recipe_process import train_recipe
from bench.training.trainings import exit_by_gates, train_all


class Run(NamedTuple):
    """A model on a data set."""

    data: Literal["ml1m", "sines"]
    model: str
    flags: tuple[str, ...]
    """The recipe and its own flags."""


ALL = (
    Run("ml1m", "shared bottom", ("shared-bottom",)),
    Run("ml1m", "MMoE", ("mmoe",)),
    Run("ml1m", "PLE", ("ple",)),
    Run("ml1m", "like alone", ("shared-bottom", "--tasks", "like")),
    Run("ml1m", "rating alone", ("shared-bottom", "--tasks", "rating")),
    Run("sines", "shared bottom", ("shared-bottom.sines",)),
    Run("sines", "MMoE", ("mmoe.sines",)),
    Run("sines", "PLE", ("ple.sines",)),
)
METRICS = {
    "ml1m": ("like/auc", "like/logloss", "rating/mse", "rating/r2"),
    "sines": ("first/mse", "second/mse", "first/r2", "second/r2"),
}
BELOW_SHARED_BOTTOM = 0.0005
BELOW_SINGLE_TASK = 0.001


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Trainings to compare."""

    data: str | None = None
    """The folder of ml-1m; without it the recipes look for it."""
    sets: tuple[Literal["ml1m", "sines"], ...] = ("ml1m", "sines")
    """Data sets: MovieLens-1M, and the made one of sines."""
    seeds: tuple[int, ...] = (1, 2, 3)
    correlation: float = 0.5
    """Correlation of the tasks of the made set."""
    max_epochs: int | None = None
    """Most epochs of each training; without it until it no longer improves."""
    processes: int = 8
    """Trainings at a time."""
    flags: str = ""
    """Further flags of the recipes, as ``--flags="--batch-size 1024"``."""
    output: Path | None = None
    """JSON to write the rows to."""


def trained(config: Config, run: Run, seed: int, folder: Path) -> Row:
    """The row of one training, in a process of its own.

    Raises:
        RuntimeError: where it failed; says what it printed last.
    """
    what = f"{run.model} on {run.data}, seed {seed}"
    arguments = [*run.flags, "--seeds", str(seed), "--output", str(folder / what)]
    if run.data == "sines":
        arguments += ["--correlation", str(config.correlation)]
    elif config.data is not None:
        arguments += ["--data", config.data]
    if config.max_epochs is not None:
        arguments += ["--max-epochs", str(config.max_epochs)]
    start = time.perf_counter()
    result = train_recipe(
        [*arguments, *shlex.split(config.flags)], what, num_processes=config.processes
    )
    return {
        "bench": "task_quality",
        "data": run.data,
        "model": run.model,
        "seed": seed,
        "correlation": config.correlation if run.data == "sines" else None,
        "num_steps": result["num_steps"],
        "seconds": time.perf_counter() - start,
        "samples_per_second": result["samples_per_second"],
        **result["test"],
    }


def mean_of(rows: Sequence[Row], run: Run) -> Row:
    """The mean of the rows of a run over its seeds."""
    rows = [row for row in rows if (row["data"], row["model"]) == (run.data, run.model)]
    return {
        "bench": "task_quality_mean",
        "data": run.data,
        "model": run.model,
        "num_seeds": len(rows),
        **{
            metric: statistics.fmean(row[metric] for row in rows)
            for metric in METRICS[run.data]
            if metric in rows[0]
        },
    }


def missed_gates(means: Sequence[Row]) -> list[str]:
    """The gates that means of whole trainings miss, a line each."""
    found = {(row["data"], row["model"]): row for row in means}
    missed = []
    if ("ml1m", "MMoE") in found:
        aucs = {model: row["like/auc"] for (_, model), row in found.items() if "like/auc" in row}
        for model in ("MMoE", "PLE"):
            for beside, allowed in (
                ("shared bottom", BELOW_SHARED_BOTTOM),
                ("like alone", BELOW_SINGLE_TASK),
            ):
                if aucs[model] < aucs[beside] - allowed:
                    missed.append(
                        f"ml1m: AUC of {model}, {aucs[model]:.5f}, is more than {allowed} below "
                        f"that of {beside}, {aucs[beside]:.5f}"
                    )
    if ("sines", "MMoE") in found:
        mmoe, shared = (
            found["sines", model]["first/mse"] + found["sines", model]["second/mse"]
            for model in ("MMoE", "shared bottom")
        )
        if not mmoe < shared:
            missed.append(
                f"sines: MMoE's squared errors, {mmoe:.5f} of both tasks, are not less than the "
                f"shared bottom's, {shared:.5f}"
            )
    return missed


def line(seed: object, row: Row) -> str:
    """``row`` as a line of the table."""
    figures = "  ".join(
        f"{row[metric]:12.5f}" if metric in row else 12 * " " for metric in METRICS[row["data"]]
    )
    steps = f"{row['num_steps']:7d}  {row['seconds']:7.0f}" if "seconds" in row else ""
    return f"{row['data']:<6} {row['model']:<14} {seed!s:<9}  {figures}  {steps}".rstrip()


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    runs = [run for run in ALL if run.data in config.sets]
    for name in config.sets:
        titles = "  ".join(f"{metric:>12}" for metric in METRICS[name])
        print(f"{name:<6} {'model':<14} {'seed':<9}  {titles}    steps  seconds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows, failed = train_all(
            (
                functools.partial(trained, config, run, seed, Path(folder))
                for seed in config.seeds
                for run in runs
            ),
            num_processes=config.processes,
            line=lambda row: line(row["seed"], row),
            output=config.output,
        )
    if failed:
        exit_by_gates(failed)
    means = [mean_of(rows, run) for run in runs]
    if config.output is not None:
        write_results(config.output, [*rows, *means])
    for row in means:
        print(line(f"mean of {row['num_seeds']}", row))
    if config.max_epochs is not None:
        print("nothing is required of trainings that were cut short")
        return
    exit_by_gates(missed_gates(means))


if __name__ == "__main__":
    main()
