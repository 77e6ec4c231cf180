"""The bench of the zoo measures its entries and goes on where one fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tyro", reason="the bench needs tyro")
from bench import models
from tests.support.failing_zoo import ENTRIES as ENTRIES_THAT_FAIL
from tests.support.tape import taped_captures
from tests.zoo import zoo
from tests.zoo.entries import Case, Entry
from tests.zoo.sizes import Sizes
from tests.zoo.zoo import ENTRIES

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("DeepFM", "a branch on what tensors hold")


def test_entries_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(sizes: Sizes) -> Case:
        raise ValueError(f"no model for batches of {sizes.batch_size}\nand more")

    entries = {name: ENTRIES[name] for name in NAMES}
    entries["failing"] = Entry(family="made up", name="failing", make=fail)
    monkeypatch.setattr(zoo, "ENTRIES", entries)
    output = tmp_path / "models.json"
    sizes = ["--device", "cpu", "--size", "tiny", "--seconds", "0", "--backend", "eager"]
    monkeypatch.setattr("sys.argv", ["models", *sizes, "--output", str(output)])
    with taped_captures(), pytest.warns(UserWarning, match="could not be captured"):
        models.main()
    rows = json.loads(output.read_text())["rows"]
    assert [row["entry"] for row in rows] == [*NAMES, "failing"]
    outcomes = [row.get("outcome") for row in rows]
    assert outcomes == ["equal, captured", "equal, eager, and said why", None]
    for row in rows[:2]:
        assert all(row[f"{system}_ms"] > 0 for system in ("plain", "compiled", "pipeline")), row
    assert rows[2]["not_printed_because"] == "ValueError: no model for batches of 8"
    printed = capsys.readouterr().out.splitlines()
    assert [entry.split("  ")[0] for entry in printed[1:]] == [*NAMES, "failing"]


def test_entries_are_chosen_by_family_and_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "measured", lambda entry, *_: {"entry": entry.name})
    arguments = ["--device", "cpu", "--entries", "^pooled/DLRM$|^tasks/MMoE"]
    monkeypatch.setattr("sys.argv", ["models", *arguments])
    models.main()
    printed = capsys.readouterr().out.splitlines()
    assert [entry.split("  ")[0] for entry in printed[1:]] == ["DLRM", "MMoE"]
    monkeypatch.setattr("sys.argv", ["models", *arguments, "--part", "2/2"])
    models.main()
    printed = capsys.readouterr().out.splitlines()
    assert [entry.split("  ")[0] for entry in printed[1:]] == ["MMoE"]


def test_ranks_go_on_where_one_fails(tmp_path: Path) -> None:
    output = tmp_path / "models.json"
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    settings = ("--device", "cpu", "--size", "tiny", "--seconds", "0", "--grace-seconds", "1")
    run = subprocess.run(
        [
            *(sys.executable, *start, "-m", "bench.models", *settings),
            *("--zoo", "tests.support.failing_zoo", "--output", str(output)),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    raising, fine, ending = json.loads(output.read_text())["rows"]
    raised = raising["not_printed_because"]
    assert "rank 1: ValueError: no model for rank 1" in raised
    assert "rank 0: it failed on another rank" in raised or "rank 0: RuntimeError" in raised
    assert fine["outcome"] == "equal, captured"
    assert fine["plain_ms"] > 0
    assert fine["pipeline_ms"] > 0
    assert "rank 1: it ended with status 3" in ending["not_printed_because"]
    names = [name.split("  ")[0] for name in run.stdout.splitlines()]
    assert names == ["entry", *ENTRIES_THAT_FAIL], "rank 0 alone prints"
