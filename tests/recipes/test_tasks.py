"""Models of several tasks as recipes: from the command line to the last line, and the made rows."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.ctr import ml1m
from recipes.tasks import ml1m as tasks_of_ml1m
from recipes.tasks import sines
from recipes.tasks.run import build_model, chosen_tasks
from recipes.train import main, parse
from tests.support import made_data
from torchembed.training import read_metrics

SMALL = [
    *("--embedding-dim", "4", "--bottom-layer-sizes", "8", "--expert-layer-sizes", "8", "4"),
    *("--num-experts", "2", "--num-task-experts", "1", "--num-shared-experts", "1"),
    *("--tower-layer-sizes", "4", "--batch-size", "64", "--max-epochs", "2"),
]
METRICS = {
    "like": {"like/auc", "like/logloss"},
    "rating": {"rating/mse", "rating/r2"},
    "first": {"first/mse", "first/r2"},
    "second": {"second/mse", "second/r2"},
}


def result_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Run a recipe in this process; what its last line says."""
    main([str(argument) for argument in arguments])
    word, _, text = capsys.readouterr().out.splitlines()[-1].partition(" ")
    assert word == "RESULT"
    return json.loads(text)


@pytest.mark.parametrize(
    ("recipe", "chosen", "tasks"),
    [
        ("shared-bottom", ["like"], ("like",)),
        ("mmoe", [], ("like", "rating")),
        ("ple", [], ("like", "rating")),
        ("mmoe.sines", ["second"], ("second",)),
    ],
)
def test_a_small_run_ends_with_the_quality_of_each_task(
    recipe: str,
    chosen: list[str],
    tasks: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    arguments = [*SMALL, "--output", output, "--seeds", 1, 2, "--stop-on", tasks[-1]]
    if recipe.endswith("sines"):
        arguments += ["--num-train", 200, "--num-held-out", 50, "--num-ids", 5]
    else:
        made_data.write_ml1m(tmp_path)
        arguments += ["--data", tmp_path]
    result = result_of(capsys, recipe, *arguments, *(("--tasks", *chosen) if chosen else ()))
    names = set().union(*(METRICS[task] for task in tasks))
    by_seed = result["test_by_seed"]
    assert by_seed.keys() == {"1", "2"}
    for name in names:
        # All three are rounded to six decimals, by half a unit at most.
        mean = (by_seed["1"][name] + by_seed["2"][name]) / 2
        assert result["test"][name] == pytest.approx(mean, rel=0, abs=2 * 0.5e-6)
    assert result["test"].keys() == names
    lines = [line for line in read_metrics(output / "seed-2") if "loss" not in line]
    assert {name for line in lines for name in line} == {
        *("step", "time"),
        *(f"validation/{name}" for name in names),
    }
    assert (output / "seed-1" / "training.png").is_file()
    assert len(list(Path(result["checkpoint"]).glob("step-*/complete.json"))) == 1


def test_one_validation_row_gives_no_score_to_stop_by(tmp_path: Path) -> None:
    arguments = [*SMALL, "--num-train", "64", "--num-held-out", "1", "--num-ids", "5"]
    with pytest.raises(ValueError, match=r"^the validation rows must have different labels, or"):
        main(["mmoe.sines", *arguments, "--seeds", "1", "--output", str(tmp_path / "out")])


def test_training_begins_at_the_mean_of_the_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stars are about 3 on average, and few steps move an output by a hundredth of that: with each
    seed a model must begin at their mean, or it learns that before all else."""
    made_data.write_ml1m(tmp_path)
    arguments = [*SMALL, "--data", tmp_path, "--output", tmp_path / "out", "--seeds", 1, 2, 3]
    by_seed = result_of(capsys, "ple", *arguments)["test_by_seed"]
    # R² is 0 where no more than the mean is known, and -2 for stars of variance 2 that are 2 off.
    for test in by_seed.values():
        assert test["rating/r2"] > -0.5


def test_outputs_start_at_the_means_of_the_labels_to_train_on(tmp_path: Path) -> None:
    rated = ml1m.read_rated(made_data.write_ml1m(tmp_path))
    labels = {"like": (rated.labels >= 4).float(), "rating": rated.labels}
    splits = ml1m.divide(dataclasses.replace(rated, labels=labels), 1)
    model = build_model(parse(["mmoe"]).config, tasks_of_ml1m.TASKS, splits, 1, torch.device("cpu"))
    rate, stars = (float(labels[name][splits.train].double().mean()) for name in labels)
    found = [float(tower[-1].bias.detach()) for tower in model.towers]  # type: ignore[index]
    # Rounded once to float32.
    eps = torch.finfo(torch.float32).eps
    assert found == pytest.approx([math.log(rate / (1 - rate)), stars], rel=eps)


def test_all_ratings_count_and_four_stars_are_likes(tmp_path: Path) -> None:
    path = made_data.write_ml1m(tmp_path)
    ratings = [float(line.split("::")[2]) for line in path.read_text().splitlines()]
    rows = ml1m.read_rated(path)
    assert len(rows) == len(ratings) and 3.0 in ratings
    assert rows.labels.tolist() == ratings


@pytest.mark.parametrize("correlation", [-1.0, 0.0, 0.5, 1.0])
def test_directions_are_units_of_the_correlation(correlation: float) -> None:
    directions = sines.directions_of(20, correlation, torch.Generator().manual_seed(0)).double()
    # Of 20 products each, and as many roundings in what was orthogonalized.
    bound = 100 * torch.finfo(torch.float32).eps
    assert ((directions @ directions.T).diagonal() - 1).abs().max() < bound
    assert abs(float(directions[0] @ directions[1]) - correlation) < bound


def test_labels_are_the_papers_sums_of_sines() -> None:
    z, phases = torch.tensor([[0.5, -1.0]]), torch.tensor([0.25, 1.5])
    expected = [value + math.sin(value + 0.25) + math.sin(2 * value + 1.5) for value in (0.5, -1.0)]
    # Sines and sums of three numbers below 4.
    bound = 8 * 4 * torch.finfo(torch.float32).eps
    assert sines.sums_of_sines(z, phases)[0].tolist() == pytest.approx(expected, abs=bound)


def test_made_rows_are_the_same_for_each_model_of_a_seed() -> None:
    arguments = ["--num-train", "3000", "--num-held-out", "500", "--correlation", "1"]
    config, other = (
        parse([name, *arguments]).config for name in ("mmoe.sines", "shared-bottom.sines")
    )
    first, second = (sines.make(c, chosen_tasks(c, sines.TASKS), 1) for c in (config, other))
    labels = first.rows.labels
    assert torch.equal(labels["first"], second.rows.labels["first"])
    assert [len(part) for part in first[1:]] == [3000, 500, 500]
    # With correlation 1 the tasks differ by their noise alone, the difference of two of variance
    # 0.01; the mean square of 4000 is off by 5 of its deviations at most.
    square = float((labels["first"] - labels["second"]).square().mean())
    assert abs(square - 0.02) < 5 * 0.02 * math.sqrt(2 / 4000)
    assert not torch.equal(sines.make(config, sines.TASKS, 2).rows.labels["first"], labels["first"])


def test_models_of_the_made_set_have_as_many_parameters() -> None:
    sizes = {}
    for name in ("shared-bottom.sines", "mmoe.sines"):
        config = parse([name, "--num-train", "8", "--num-held-out", "1"]).config
        splits = sines.make(config, sines.TASKS, 1)
        model = build_model(config, sines.TASKS, splits, 1, torch.device("cpu"))
        sizes[name] = sum(parameter.numel() for parameter in model.parameters())
    # One unit of the bottom has 57.
    assert abs(sizes["shared-bottom.sines"] - sizes["mmoe.sines"]) < 57


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "share"], r"^tasks must be of \['first', 'second'\], .* got \['share'\]$"),
        (
            ["--stop-on", "like"],
            r"^stop_on must be one of the tasks \['first', 'second'\], or left",
        ),
        (["--tasks", "first", "--stop-on", "second"], r"^stop_on must be one .* \['first'\], or"),
    ],
)
def test_unknown_tasks_are_named(arguments: list[str], message: str) -> None:
    config = parse(["mmoe.sines", *arguments]).config
    with pytest.raises(ValueError, match=message):
        chosen_tasks(config, sines.TASKS)


def test_a_correlation_is_a_cosine() -> None:
    with pytest.raises(ValueError, match=r"^correlation must be from -1 to 1, got 1\.5$"):
        sines.SinesConfig(architecture=sines.Architecture.MMOE, correlation=1.5)
