"""Gates of models of several tasks, and runs of the recipes by the bench."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tyro", reason="the bench needs tyro")
from bench.training import task_quality
from bench.training.task_quality import ALL, mean_of, missed_gates


def of_ml1m(**aucs: float) -> list[dict[str, Any]]:
    names = {"shared": "shared bottom", "mmoe": "MMoE", "ple": "PLE", "like": "like alone"}
    return [{"data": "ml1m", "model": names[key], "like/auc": auc} for key, auc in aucs.items()]


def of_sines(mmoe: float, shared: float) -> list[dict[str, Any]]:
    return [
        {"data": "sines", "model": model, "first/mse": 0.1, "second/mse": mse}
        for model, mse in (("MMoE", mmoe), ("shared bottom", shared))
    ]


@pytest.mark.parametrize(
    ("means", "missed"),
    [
        (of_ml1m(shared=0.8, mmoe=0.7996, ple=0.7996, like=0.8005), []),
        (
            of_ml1m(shared=0.8, mmoe=0.7994, ple=0.8, like=0.79),
            ["ml1m: AUC of MMoE, 0.79940, is more than 0.0005 below that of shared bottom"],
        ),
        (
            of_ml1m(shared=0.79, mmoe=0.8, ple=0.7989, like=0.8),
            ["ml1m: AUC of PLE, 0.79890, is more than 0.001 below that of like alone, 0.80000"],
        ),
        (of_sines(0.1, 0.2), []),
        (
            of_sines(0.2, 0.2),
            ["sines: MMoE's squared errors, 0.30000 of both tasks, are not less "],
        ),
    ],
)
def test_gates(means: list[dict[str, Any]], missed: list[str]) -> None:
    found = missed_gates(means)
    assert len(found) == len(missed)
    assert all(said.startswith(expected) for said, expected in zip(found, missed, strict=True))


def test_means_are_over_seeds_of_one_model() -> None:
    run = next(run for run in ALL if run.model == "like alone")
    rows = [*of_ml1m(like=0.25), *of_ml1m(mmoe=0.9), *of_ml1m(like=0.75)]
    found = mean_of(rows, run)
    assert (found["like/auc"], found["num_seeds"]) == (0.5, 2)
    assert "rating/mse" not in found


def test_recipes_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"
    arguments = ["--sets", "sines", "--max-epochs", "1", "--seeds", "1", "--processes", "2"]
    arguments += ["--output", str(output), "--flags=--num-train 100 --num-held-out 50"]
    monkeypatch.setattr("sys.argv", ["task_quality", *arguments])
    monkeypatch.setattr(task_quality, "ALL", [run for run in ALL if run.model == "MMoE"])
    task_quality.main()
    rows = json.loads(output.read_text())["rows"]
    assert [r["bench"] for r in rows] == ["task_quality", "task_quality_mean"]
    assert rows[0]["first/mse"] == rows[1]["first/mse"]
    assert rows[0]["correlation"] == 0.5
    assert "nothing is required" in capsys.readouterr().out
