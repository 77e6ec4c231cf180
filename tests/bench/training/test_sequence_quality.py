"""Gates of sequence models, and runs of the recipes by the bench."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tyro", reason="the bench needs tyro")
from bench.training import sequence_quality
from bench.training.sequence_quality import METRICS, Config, mean_of, missed_gates, trained
from tests.support import made_data


def row(recipe: str, hr_10: float, ndcg_10: float = 0.16) -> dict[str, Any]:
    figures = dict(zip(METRICS, (hr_10, ndcg_10, 0.5, 0.7), strict=True))
    return {"recipe": recipe, "epochs": 101, **figures}


@pytest.mark.parametrize(
    ("sasrec", "ndcg", "hstu", "missed"),
    [
        (0.275, 0.153, 0.286, []),
        (0.274, 0.153, 0.286, ["sasrec: hr_10 0.2740 is below 0.2750"]),
        (0.275, 0.152, 0.286, ["sasrec: ndcg_10 0.1520 is below 0.1530"]),
        (0.28, 0.16, 0.285, ["hstu: hr_10 0.2850 is below 0.2900"]),
    ],
)
def test_gates(sasrec: float, ndcg: float, hstu: float, missed: list[str]) -> None:
    rows = [row("sasrec", sasrec, ndcg), row("hstu", hstu)]
    assert missed_gates([mean_of(rows, recipe) for recipe in ("sasrec", "hstu")]) == missed


def test_means_are_over_seeds() -> None:
    found = mean_of([row("sasrec", 0.25), row("hstu", 0.9), row("sasrec", 0.75)], "sasrec")
    assert (found["hr_10"], found["num_seeds"]) == (0.5, 2)
    assert missed_gates([found]) == []


def test_recipes_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_data.write_ml1m(tmp_path)
    output = tmp_path / "found.json"
    arguments = ["--data", str(tmp_path), "--epochs", "1", "--seeds", "1", "--processes", "2"]
    arguments += ["--output", str(output), "--recipes", "hstu"]
    arguments += ["--flags=--max-length 8 --num-negatives 2"]
    monkeypatch.setattr("sys.argv", ["sequence_quality", *arguments])
    sequence_quality.main()
    rows = json.loads(output.read_text())["rows"]
    assert [r["bench"] for r in rows] == ["sequence_quality", "sequence_quality_mean"]
    assert rows[0]["hr_10"] == rows[1]["hr_10"]
    said = capsys.readouterr().out
    assert "0.3097" in said and "no gate applies" in said


def test_a_run_that_fails_is_said(tmp_path: Path) -> None:
    config = Config(data=str(tmp_path / "none"))
    with pytest.raises(RuntimeError, match=r"(?s)sasrec, seed 1, ended with 1: .*there is no such"):
        trained(config, "sasrec", 1, tmp_path)
