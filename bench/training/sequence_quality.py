"""Do sequence models rank as published? SASRec and HSTU on MovieLens-1M, several seeds at once.

``python -m bench.training.sequence_quality --data <folder>`` trains each recipe once for each seed,
in processes that share one GPU, and prints hit rates and NDCG of each run and of the mean, beside
the gates and what J. Zhai et al. publish ("Actions Speak Louder than Words", ICML 2024, and the
repository meta-recsys/generative-recommenders). It fails where a mean of whole trainings is below
its gate, or a training fails; ``--epochs`` cuts them short, and no gate applies then. ``--output``
is written after each run.
"""

import dataclasses
import functools
import shlex
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import tyro

from bench.report.result_file import Row, write_results
from bench.training.recipe_process import train_recipe
from bench.training.trainings import exit_by_gates, train_all

WHOLE_EPOCHS = 101
METRICS = ("hr_10", "ndcg_10", "hr_50", "hr_200")
PUBLISHED: dict[str, Row] = {
    "sasrec": {"hr_10": 0.2853, "ndcg_10": 0.1603, "hr_50": 0.5474, "hr_200": 0.7528},
    "hstu": {"hr_10": 0.3097, "ndcg_10": 0.1720, "hr_50": 0.5754, "hr_200": 0.7716},
}
GATES = {"sasrec": {"hr_10": 0.275, "ndcg_10": 0.153}}
HSTU_LEAD = 0.01
"""The least lead of HSTU's hit rate at 10 over SASRec's of the same run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Trainings to compare."""

    data: str | None = None
    """The folder of ml-1m; without it the recipes look for it."""
    recipes: tuple[str, ...] = ("sasrec", "hstu")
    seeds: tuple[int, ...] = (1, 2, 3)
    epochs: int = WHOLE_EPOCHS
    processes: int = 6
    """Trainings at a time."""
    flags: str = ""
    """Further flags of the recipes, as ``--flags="--precision BF16"``."""
    output: Path | None = None
    """JSON to write the rows to."""


def trained(config: Config, recipe: str, seed: int, folder: Path) -> Row:
    """The row of one training, in a process of its own.

    Raises:
        RuntimeError: where it failed; says what it printed last.
    """
    arguments = [recipe, "--seeds", str(seed), "--epochs", str(config.epochs)]
    arguments += ["--output", str(folder / f"{recipe}-{seed}"), *shlex.split(config.flags)]
    arguments += ["--data", config.data] if config.data is not None else []
    start = time.perf_counter()
    what = f"{recipe}, seed {seed}"
    result = train_recipe(arguments, what, num_processes=config.processes)
    return {
        "bench": "sequence_quality",
        "recipe": recipe,
        "seed": seed,
        "epochs": config.epochs,
        "seconds": time.perf_counter() - start,
        "samples_per_second": result["samples_per_second"],
        **{metric: result[metric] for metric in METRICS},
    }


def mean_of(rows: Sequence[Row], recipe: str) -> Row:
    """The mean of a recipe's rows, and the gates that it misses."""
    rows = [row for row in rows if row["recipe"] == recipe]
    means = {metric: statistics.fmean(row[metric] for row in rows) for metric in METRICS}
    return {
        "bench": "sequence_quality_mean",
        "recipe": recipe,
        "num_seeds": len(rows),
        "epochs": rows[0]["epochs"],
        "hr_10_deviation": statistics.stdev(row["hr_10"] for row in rows) if rows[1:] else 0.0,
        **means,
    }


def missed_gates(means: Sequence[Row]) -> list[str]:
    """The gates that means of whole trainings miss, a line each."""
    by_recipe = {row["recipe"]: row for row in means}
    gates = {recipe: dict(found) for recipe, found in GATES.items()}
    if "sasrec" in by_recipe:
        gates["hstu"] = {"hr_10": by_recipe["sasrec"]["hr_10"] + HSTU_LEAD}
    return [
        f"{recipe}: {metric} {by_recipe[recipe][metric]:.4f} is below {least:.4f}"
        for recipe, found in gates.items()
        if recipe in by_recipe
        for metric, least in found.items()
        if by_recipe[recipe][metric] < least
    ]


def line(name: str, seed: object, row: Row) -> str:
    """``row`` as a line of the table."""
    seconds = f"{row['seconds']:8.0f}" if "seconds" in row else ""
    figures = "  ".join(f"{row[metric]:.4f}" for metric in METRICS)
    return f"{name:<10} {seed!s:<9}  {figures}  {seconds}".rstrip()


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    print("recipe     seed       HR@10  NDCG@10  HR@50  HR@200   seconds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows, failed = train_all(
            (
                functools.partial(trained, config, recipe, seed, Path(folder))
                for seed in config.seeds
                for recipe in config.recipes
            ),
            num_processes=config.processes,
            line=lambda row: line(row["recipe"], row["seed"], row),
            output=config.output,
        )
    if failed:
        exit_by_gates(failed)
    means = [mean_of(rows, recipe) for recipe in config.recipes]
    if config.output is not None:
        write_results(config.output, [*rows, *means])
    for row in means:
        print(line(row["recipe"], f"mean of {row['num_seeds']}", row))
        if row["recipe"] in PUBLISHED:
            print(line("", "published", PUBLISHED[row["recipe"]]))
    if config.epochs < WHOLE_EPOCHS:
        print(f"no gate applies to fewer than {WHOLE_EPOCHS} epochs")
        return
    exit_by_gates(missed_gates(means))


if __name__ == "__main__":
    main()
