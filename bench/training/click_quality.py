"""Do models of clicks learn as published? All of them on Frappe, and DCNv2 on MovieLens-1M.

``python -m bench.training.click_quality --data <folder>`` trains each recipe once for each seed, in
processes that share one GPU, and prints the mean AUC and log loss on test rows beside the published
ones (https://openbenchmark.github.io/BARS and https://recbole.io) and the gates. It fails where a
mean misses its gate, or where logistic regression, factorization machine and deep models are not as
far apart as they are published to be. Trainings are kept in ``--folder``: called again, it goes on
with those that had not ended. ``--output`` is written after each training.
"""

import dataclasses
import functools
import json
import re
import shlex
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import tyro

from bench.report.result_file import Row, write_results
from bench.training.recipe_process import train_recipe
from bench.training.trainings import exit_by_gates, train_all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """Published quality of a recipe's model, and what its mean over seeds must reach."""

    recipe: str
    auc: float
    logloss: float
    least_auc: float | None = None
    most_logloss: float | None = None


GATES = (
    # The first take the most epochs.
    Gate(recipe="lr.frappe", auc=0.93558, logloss=0.3076),
    Gate(recipe="fm.frappe", auc=0.96711, logloss=0.2065),
    Gate(recipe="dcnv2.ml1m", auc=0.8998, logloss=0.3119, least_auc=0.895, most_logloss=0.325),
    Gate(recipe="autoint.frappe", auc=0.98481, logloss=0.1490),
    Gate(
        recipe="wide-and-deep.frappe",
        auc=0.98307,
        logloss=0.1540,
        least_auc=0.982,
        most_logloss=0.160,
    ),
    Gate(recipe="dnn.frappe", auc=0.98405, logloss=0.1584, least_auc=0.983),
    Gate(recipe="deepfm.frappe", auc=0.98395, logloss=0.1495, least_auc=0.983, most_logloss=0.155),
    Gate(recipe="dcn.frappe", auc=0.98342, logloss=0.1507, least_auc=0.9825, most_logloss=0.156),
    Gate(recipe="dcnv2.frappe", auc=0.98382, logloss=0.1520, least_auc=0.9835, most_logloss=0.156),
    Gate(recipe="dlrm.frappe", auc=0.98400, logloss=0.1444, least_auc=0.983, most_logloss=0.152),
    Gate(recipe="xdeepfm.frappe", auc=0.98414, logloss=0.1461, least_auc=0.983),
)
LINEAR, PAIRS = "lr.frappe", "fm.frappe"
LEAST_STEPS = {LINEAR: 0.02, PAIRS: 0.01}
"""The least that the AUC of a model is below those of all models of a higher degree."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Trainings to compare."""

    data: str | None = None
    """The folder of Frappe_x1 and ml-1m; without it the recipes look for them."""
    recipes: str = "."
    """A regular expression; recipes are trained whose name it finds."""
    seeds: tuple[int, ...] = (1, 2, 3)
    processes: int = 12
    """Trainings at a time."""
    flags: str = ""
    """Further flags of the recipes, as ``--flags="--max-epochs 2"``; no gate applies then."""
    folder: Path = Path("runs/click_quality")
    """Folder that the trainings are kept in."""
    output: Path | None = None
    """JSON to write the rows to."""


def trained(config: Config, recipe: str, seed: int) -> Row:
    """The row of one training: of one that has ended before, or goes on where it was cut short.

    Raises:
        RuntimeError: where it fails; says what it printed last.
    """
    folder = config.folder / f"{recipe}-{seed}"
    kept = folder / "row.json"
    if kept.is_file():
        return json.loads(kept.read_text())
    arguments = ["--seeds", str(seed), "--output", str(folder), *shlex.split(config.flags)]
    arguments += ["--data", config.data] if config.data is not None else []
    if (folder / "arguments.json").is_file():
        arguments = ["--resume", str(folder)]
    start = time.perf_counter()
    result = train_recipe(
        [recipe, *arguments], f"{recipe}, seed {seed}", num_processes=config.processes
    )
    row = {
        "bench": "click_quality",
        "recipe": recipe,
        "seed": seed,
        "auc": result["test_auc"],
        "logloss": result["test_logloss"],
        "num_steps": result["num_steps"],
        "seconds": time.perf_counter() - start,
    }
    partial = folder / "row.json.partial"
    partial.write_text(json.dumps(row))
    partial.replace(kept)
    return row


def mean_of(rows: Sequence[Row], gate: Gate) -> Row:
    """The mean of a recipe's rows beside what is published."""
    rows = [row for row in rows if row["recipe"] == gate.recipe]
    aucs, loglosses = ([row[name] for row in rows] for name in ("auc", "logloss"))
    return {
        "bench": "click_quality_mean",
        "recipe": gate.recipe,
        "num_seeds": len(rows),
        "auc": statistics.fmean(aucs),
        "auc_deviation": statistics.stdev(aucs) if rows[1:] else 0.0,
        "logloss": statistics.fmean(loglosses),
        "published_auc": gate.auc,
        "published_logloss": gate.logloss,
        "least_auc": gate.least_auc,
        "most_logloss": gate.most_logloss,
    }


def missed_gates(means: Sequence[Row]) -> list[str]:
    """The gates that means miss, a line each."""
    missed = []
    for row in means:
        recipe, least, most = row["recipe"], row["least_auc"], row["most_logloss"]
        if least is not None and not row["auc"] >= least:
            missed.append(f"{recipe}: AUC {row['auc']:.5f} is below {least:.5f}")
        if most is not None and not row["logloss"] <= most:
            missed.append(f"{recipe}: log loss {row['logloss']:.4f} is above {most:.4f}")
    aucs = {row["recipe"]: row["auc"] for row in means if row["recipe"].endswith(".frappe")}
    deep = {recipe: auc for recipe, auc in aucs.items() if recipe not in LEAST_STEPS}
    for lower, higher in ((LINEAR, {PAIRS: aucs[PAIRS]} if PAIRS in aucs else {}), (PAIRS, deep)):
        missed += [
            f"{lower}: AUC {aucs[lower]:.5f} is not {LEAST_STEPS[lower]} below {recipe}'s {auc:.5f}"
            for recipe, auc in higher.items()
            if lower in aucs and not aucs[lower] < auc - LEAST_STEPS[lower]
        ]
    return missed


HEADER = "recipe                    AUC  deviation  published  gate     log loss  published  gate"


def line_of_training(row: Row) -> str:
    """A training as a line."""
    return (
        f"{row['recipe']}, seed {row['seed']}: AUC {row['auc']:.5f}, log loss "
        f"{row['logloss']:.4f}, {row['num_steps']} steps, {row['seconds']:.0f} s"
    )


def line(row: Row) -> str:
    """A mean as a line of the table."""
    least, most = row["least_auc"], row["most_logloss"]
    return (
        f"{row['recipe']:<22} {row['auc']:.5f}  {row['auc_deviation']:9.5f}    "
        f"{row['published_auc']:.5f}  {'' if least is None else f'{least:.4f}':<7}   "
        f"{row['logloss']:.4f}     {row['published_logloss']:.4f}  "
        f"{'' if most is None else f'{most:.4f}'}"
    ).rstrip()


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    gates = [gate for gate in GATES if re.search(config.recipes, gate.recipe)]
    start = time.perf_counter()
    rows, failed = train_all(
        (
            functools.partial(trained, config, gate.recipe, seed)
            for gate in gates
            for seed in config.seeds
        ),
        num_processes=config.processes,
        line=line_of_training,
        output=config.output,
    )
    complete = [g for g in gates if sum(r["recipe"] == g.recipe for r in rows) == len(config.seeds)]
    means = [mean_of(rows, gate) for gate in complete]
    if config.output is not None:
        write_results(config.output, [*rows, *means])
    print("\n".join([HEADER, *map(line, means), f"{time.perf_counter() - start:.0f} s"]))
    if config.flags:
        print(f"no gate applies to trainings with {config.flags}")
        raise SystemExit(1 if failed else 0)
    exit_by_gates([*failed, *missed_gates(means)])


if __name__ == "__main__":
    main()
