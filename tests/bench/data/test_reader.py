"""Readers are measured, and give back what was written."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.data import reader
from tests.support.tolerance import relative_error


def test_every_format_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    output = tmp_path / "reader.json"
    arguments = ["--num-rows", "100", "--batch-size", "32", "--num-threads", "1", "1000000"]
    arguments += ["--seconds", "0"]
    monkeypatch.setattr(
        "sys.argv", ["reader", *arguments, "--folder", str(tmp_path), "--output", str(output)]
    )
    reader.main()
    rows = json.loads(output.read_text())["rows"]
    assert [row["format"] for row in rows] == list(reader.FORMATS)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
    assert list(tmp_path.iterdir()) == [output]


def test_what_was_not_written_is_refused(tmp_path: Path) -> None:
    rows = reader.random_rows(40)
    reader.write_mlperf(rows, tmp_path)
    measured = reader.measure("mlperf", rows, tmp_path, 2, 16, seconds=0.0)
    # float32 dense features and labels, int32 ids.
    assert measured["bytes_per_second"] / measured["samples_per_second"] == pytest.approx(
        # Two quotients, and theirs.
        4 * (13 + 1 + 214),
        rel=relative_error(3, torch.float64),
        abs=0,
    )
    other = rows._replace(labels=1 - np.ones(40, np.int32))
    with pytest.raises(AssertionError, match="mlperf: labels and ids sum up to"):
        reader.measure("mlperf", other, tmp_path, 1, 16, seconds=0.0)
