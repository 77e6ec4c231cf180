"""The stages of the input are measured, by several processes, on all the bytes that there are."""

import json
from pathlib import Path

import pytest
import torch

from bench.data import input_stages
from bench.data.input_stages import Case, Config, Passed
from bench.data.reader import random_rows, write_mlperf
from torchembed.data import MlperfDays

SAMPLE_BYTES = 4 * (13 + 1 + 214)
"""float32 dense features and labels, int32 ids."""


def test_stages_without_a_gpu_are_readings() -> None:
    config = Config(num_threads=(1, 2), num_threads_of_several=(1,), num_processes=3)
    assert input_stages.cases(config, has_gpu=False) == [
        Case("memory", "read", 1, 1),
        Case("memory", "read", 1, 2),
        Case("memory", "read", 3, 1),
        Case("disk", "read", 1, 1),
        Case("disk", "read", 1, 2),
        Case("disk", "read", 3, 1),
    ]


def test_copies_alone_are_measured_once_for_each_number_of_processes() -> None:
    config = Config(num_threads=(1, 2), num_threads_of_several=(1, 2), num_processes=3)
    cases = input_stages.cases(config, has_gpu=True)
    assert [case for case in cases if case.stage == "copy"] == [
        Case("memory", "copy", 1, 1),
        Case("memory", "copy", 3, 1),
    ]
    assert {case.stage for case in cases if case.place == "disk"} == {"read and copy"}
    assert len(cases) == len(set(cases))


def test_rates_of_processes_are_added() -> None:
    config = Config(batch_size=8192, step_ms=2.8)
    passed = [Passed(1000, 0.5, 0.25), Passed(3000, 1.0, 0.5)]
    row = input_stages.summed(Case("memory", "read", 2, 1), config, passed)
    assert (row["bytes_per_second"], row["cores"]) == (5000.0, 1.0)
    assert round(row["needed_bytes_per_second"]) == round(2 * 8192 * SAMPLE_BYTES / 0.0028)


def test_processes_read_all_files_of_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "input_stages.json"
    arguments = ["--num-rows", "100", "--batch-size", "16", "--num-threads", "2", "--seconds", "0"]
    arguments += ["--num-threads-of-several", "1", "--num-processes", "2", "--output", str(output)]
    arguments += ["--memory-folder", str(tmp_path), "--disk-folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["input_stages", *arguments])
    input_stages.main()
    rows = json.loads(output.read_text())["rows"]
    assert {row["place"] for row in rows} == {"memory", "disk"}
    assert {row["num_processes"] for row in rows} == {1, 2}
    assert all(row["bytes_per_second"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pass_takes_the_rows_of_its_process(tmp_path: Path, rank: int) -> None:
    write_mlperf(random_rows(40), tmp_path)
    input_stages.forget_files(tmp_path)
    config = Config(batch_size=16)
    passed = input_stages.Passes(config, tmp_path, rank).measure(
        Case("disk", "read", 2, 1), only_one=True
    )
    source = MlperfDays(tmp_path, batch_size=16, rank=rank, world_size=2)
    assert passed.num_bytes == SAMPLE_BYTES * sum(len(batch.labels) for batch in source)
    assert {batch.sparse.values.dtype for batch in source} == {torch.int32}
