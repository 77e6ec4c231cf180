"""The comparison of row choices on Frappe, on a made file of its form."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tyro", reason="the bench needs tyro")
import torch

from bench.training import frappe_rows
from bench.training.quality import CHOICES


def test_every_choice_is_trained_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(1)
    arrays = {}
    for part, count in (("train", 700), ("valid", 90), ("test", 80)):
        ids = generator.integers(0, [5, 40], (count, 2))
        arrays[f"{part}_x"] = np.add(ids, [0, 5]).astype(np.int16)
        arrays[f"{part}_y"] = (ids[:, 0] > 2).astype(np.int8)
    np.savez(tmp_path / "made.npz", **arrays)
    parts, sizes = frappe_rows.read(tmp_path / "made.npz", torch.device("cpu"))
    assert sizes == [5, 40] and parts["test"].ids.min() == 0
    (first, *_) = parts["valid"].batches(torch.arange(90), 64)
    assert first.sparse.values.tolist() == parts["valid"].ids[:64].t().flatten().tolist()
    output = tmp_path / "rows.json"
    flags = ["--data", str(tmp_path / "made.npz"), "--output", str(output), "--seeds", "1"]
    flags += ["--max-epochs", "3", "--batch-size", "64", "--layer-sizes", "8"]
    monkeypatch.setattr("sys.argv", ["frappe_rows", *flags])
    frappe_rows.main()
    rows = json.loads(output.read_text())["rows"]
    trained = [row for row in rows if row["bench"] == "frappe_rows"]
    assert [row["choice"] for row in trained] == list(CHOICES["rows"])
    assert [row["bytes_per_row"] for row in trained] == [128, 96, 96, 68, 36]
    # The label follows from the first field.
    assert all(row["auc"] > 0.9 for row in trained)
    assert "mean AUC" in capsys.readouterr().out
