"""Gates of models of clicks, and runs of the recipes by the bench."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tyro", reason="the bench needs tyro")
from bench.training import click_quality
from bench.training.click_quality import GATES, Config, mean_of, missed_gates, trained
from recipes.registry import RECIPES
from tests.support import made_data

PASSING = {"lr.frappe": 0.94, "fm.frappe": 0.965, "deepfm.frappe": 0.984, "dcnv2.ml1m": 0.896}


def means(aucs: dict[str, float], logloss: float = 0.15) -> list[dict[str, Any]]:
    gates = {gate.recipe: gate for gate in GATES}
    rows = [{"recipe": recipe, "auc": auc, "logloss": logloss} for recipe, auc in aucs.items()]
    return [mean_of(rows, gates[recipe]) for recipe in aucs]


@pytest.mark.parametrize(
    ("changed", "logloss", "missed"),
    [
        ({}, 0.15, []),
        ({}, 0.1551, ["deepfm.frappe: log loss 0.1551 is above 0.1550"]),
        ({"deepfm.frappe": 0.9829}, 0.15, ["deepfm.frappe: AUC 0.98290 is below 0.98300"]),
        (
            {"lr.frappe": 0.946},
            0.15,
            ["lr.frappe: AUC 0.94600 is not 0.02 below fm.frappe's 0.96500"],
        ),
        (
            {"fm.frappe": 0.975},
            0.15,
            ["fm.frappe: AUC 0.97500 is not 0.01 below deepfm.frappe's 0.98400"],
        ),
        ({"dcnv2.ml1m": 0.894}, 0.15, ["dcnv2.ml1m: AUC 0.89400 is below 0.89500"]),
        (
            {"deepfm.frappe": float("nan")},
            0.15,
            [
                "deepfm.frappe: AUC nan is below 0.98300",
                "fm.frappe: AUC 0.96500 is not 0.01 below deepfm.frappe's nan",
            ],
        ),
    ],
)
def test_gates(changed: dict[str, float], logloss: float, missed: list[str]) -> None:
    assert missed_gates(means(PASSING | changed, logloss)) == missed


def test_a_part_of_the_recipes_has_gates_of_its_own() -> None:
    assert missed_gates(means({"fm.frappe": 0.5})) == []
    assert missed_gates([]) == []


def test_every_gate_is_of_a_recipe_and_holds_for_what_is_published() -> None:
    assert {gate.recipe for gate in GATES} <= RECIPES.keys()
    rows = [{"recipe": g.recipe, "auc": g.auc, "logloss": g.logloss} for g in GATES]
    assert missed_gates([mean_of(rows, gate) for gate in GATES]) == []


def test_recipes_are_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second call takes what the first one has trained."""
    made_data.write_frappe(tmp_path)
    flags = "--max-epochs 1 --batch-size 64 --embedding-dim 4 --layer-sizes 8"
    output = tmp_path / "found.json"
    arguments = ["--data", str(tmp_path), "--seeds", "1", "--recipes", "^deepfm"]
    arguments += ["--folder", str(tmp_path / "runs"), "--output", str(output), f"--flags={flags}"]
    monkeypatch.setattr("sys.argv", ["click_quality", *arguments])

    def rows() -> list[dict[str, Any]]:
        with pytest.raises(SystemExit) as exit_info:
            click_quality.main()
        assert exit_info.value.code == 0
        return json.loads(output.read_text())["rows"]

    row, mean = rows()
    assert (mean["auc"], mean["num_seeds"]) == (row["auc"], 1)
    said = capsys.readouterr().out
    assert "0.98395" in said and "no gate applies" in said
    assert rows() == [row, mean]  # the seconds, too


def test_a_run_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    """With the arguments that it was started with."""
    folder = tmp_path / "deepfm.frappe-1"
    folder.mkdir()
    note = {"recipe": "deepfm.frappe", "arguments": ["--data", str(tmp_path / "none")]}
    (folder / "arguments.json").write_text(json.dumps(note))
    config = Config(folder=tmp_path)
    with pytest.raises(
        RuntimeError, match=r"(?s)deepfm.frappe, seed 1, ended with 1: .*names .*none"
    ):
        trained(config, "deepfm.frappe", 1)
