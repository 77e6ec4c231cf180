"""Trainings of several recipes at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.training.trainings import exit_by_gates, train_all


def training(number: int) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        if number == 1:
            raise RuntimeError("second, ended with 1: no rows")
        return {"number": number}

    return run


def test_a_training_that_fails_ends_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"
    rows, failed = train_all(
        map(training, range(3)),
        num_processes=1,
        line=lambda row: f"number {row['number']}",
        output=output,
    )
    assert rows == json.loads(output.read_text())["rows"]
    assert sorted(row["number"] for row in rows) == [0, 2]
    assert failed == ["second, ended with 1: no rows"]
    said = capsys.readouterr().out.splitlines()
    assert sorted(said) == ["number 0", "number 2", *failed]


def test_faults_of_the_bench_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        train_all([lambda: {"auc": 1 // 0}], num_processes=1, line=str, output=None)


@pytest.mark.parametrize(
    ("missed", "code", "said"),
    [([], 0, "passes the gates\n"), (["AUC is low", "so is R²"], 1, "AUC is low\nso is R²\n")],
)
def test_the_process_ends_by_its_gates(
    missed: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        exit_by_gates(missed)
    assert exit_info.value.code == code
    assert capsys.readouterr().out == said
