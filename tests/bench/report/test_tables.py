"""The figures on the pages are those of the files of results."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.report import tables as program


@pytest.mark.parametrize("page", program.PAGES, ids=lambda page: page.name)
def test_the_page_agrees_with_the_results(page: Path) -> None:
    written = program.PAGES[page](program.ROOT / "bench/results")
    assert program.with_tables(page.read_text(), written) == page.read_text(), (
        "run python -m bench.report.tables"
    )


def step(system: str, ms: float | None, **others: Any) -> dict[str, Any]:
    row = {
        "bench": "train_step", "system": system, "gpu": "H200", "num_gpus": 8, "ids": "zipf",
        "batch_per_gpu": 512, "optimizer": "adagrad", "max_rows": None, "precision": "bf16",
        "profiled": "once all were timed",
    }  # fmt: skip
    times = {} if ms is None else {"ms_median": ms, "ms_min": ms - 0.1, "ms_max": ms + 0.25}
    return row | times | others


def kernel(system: str, stage: str, optimizer: str | None, us: float) -> dict[str, Any]:
    return {
        "bench": "kernels", "system": system, "stage": stage, "optimizer": optimizer,
        "batch_per_gpu": 512, "ids": "uniform", "microseconds": us, "of_fbgemm": 0.5,
    }  # fmt: skip


def test_steps_and_kernels(tmp_path: Path) -> None:
    steps = [
        step("torchembed", 0.5, floor_fraction=0.515),
        step("torchrec", 10.0),
        step("torchrec_tuned", 8.0),
        step("torchembed_tf32", None, not_printed_because="losses"),
        step("torchrec", 3.0, batch_per_gpu=2048),
        step("torchrec", 18.0, batch_per_gpu=8192),
        step("torchembed_tf32", 6.0, batch_per_gpu=8192, precision="tf32"),
    ]
    kernels = [
        kernel("torchembed", "forward", None, 25.6),
        kernel("FBGEMM", "forward", None, 51.2),
        kernel("torchembed", "update", "Adagrad", 100.4),
        kernel("torchembed", "forward", None, 26.0),
    ]
    for name, rows in {"b": steps, "a": kernels}.items():
        result = {"hardware": {"gpu": "NVIDIA H200"}, "commit": "0123456789", "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    lines = [x for x in program.tables(tmp_path).splitlines() if x.startswith("| ")]
    times = "0.50 (0.40 to 0.75) |  | 10.00 (9.90 to 10.25) | 8.00 (7.90 to 8.25) | 16.0 | 0.52"
    tf32 = "6.00 (5.90 to 6.25) | 18.00 (17.90 to 18.25) |  | 3.0 | "
    assert lines[2:] == [
        f"| 8 H200, 512 each, zipf, adagrad | {times} |",
        f"| 8 H200, 8192 each, zipf, adagrad |  | {tf32} |",
        "| batch | forward | update, Adagrad |",
        "| --- | --- | --- |",
        "| 512 uniform | 26 (0.50) | 100 (0.50) |",
    ]


def test_choices_and_marks(tmp_path: Path) -> None:
    """Steps that were timed after profiles are marked, and wires of 8 bits said."""
    rows = [
        step("torchembed", 2.0, batch_per_gpu=8192, profiled=None),
        step("torchembed", 1.0, wire="bf16"),
        step("torchembed_bf16_rows", 0.9, wire="bf16"),
        step("torchembed", 3.0, batch_per_gpu=2048, wire="fp8"),
    ]
    result = {"hardware": {"gpu": "NVIDIA H200"}, "commit": "0123456789", "rows": rows}
    (tmp_path / "a.json").write_text(json.dumps(result))
    written, in_8_bits = program.tables(tmp_path), "3.00 (2.90 to 3.25)"
    assert [x for x in written.splitlines() if x.startswith("| 8")] == [
        "| 8 H200, 8192 each, zipf, adagrad † | 2.00 (1.90 to 2.25) |  |  |  |  |  |",
        "| 8 H200, 512 each, zipf, adagrad | 1.00 (0.90 to 1.25) |  |  |  |  |  |",
        f"| 8 H200, 2048 each, zipf, adagrad, 8 bits between GPUs | {in_8_bits} |  |  |  |  |  |",
        "| 8 H200, 512 each, zipf, adagrad | 1.00 (0.90 to 1.25) | 0.90 (0.80 to 1.15) |  |",
    ]


def test_shapes(tmp_path: Path) -> None:
    row = {"bench": "shapes", "system": "torchembed", "shape": "dim 64, sum", "optimizer": "SGD"}
    row |= {"tables": "16 of 1000 rows"}
    times = {"forward_microseconds": 9.6, "forward_of_fbgemm": 0.875, "in_all_microseconds": 30.4}
    rows = [row | times, row | {"system": "FBGEMM"}, row | {"shape": "dim 8, sum"}]
    result = {"hardware": {"gpu": "NVIDIA H200"}, "commit": "0123456789", "rows": rows}
    (tmp_path / "shapes.json").write_text(json.dumps(result))
    lines = [x for x in program.tables(tmp_path).splitlines() if x.startswith("| dim")]
    assert lines == ["| dim 64, sum, SGD | 10 (0.88) | 30 |", "| dim 8, sum, SGD |  |  |"]


def test_figures_of_two_runs_are_not_compared(tmp_path: Path) -> None:
    of_files = {
        "a": [step("torchembed", 0.5, transport="push")],
        "b": [step("torchembed", 1.0), step("torchrec", 10.0)],
    }
    for name, rows in of_files.items():
        result = {"hardware": {"gpu": "NVIDIA H200"}, "commit": "0123456789", "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    lines = [x for x in program.tables(tmp_path).splitlines() if x.startswith("| 8")]
    times = "1.00 (0.90 to 1.25) |  | 10.00 (9.90 to 10.25) |  | 10.0 | "
    assert lines == [
        "| 8 H200, 512 each, zipf, adagrad, push | 0.50 (0.40 to 0.75) |  |  |  |  |  |",
        f"| 8 H200, 512 each, zipf, adagrad | {times} |",
    ]
    assert "`bench/results/a.json` of 0123456, `bench" in program.tables(tmp_path)


def test_one_sentence_speaks_of_one_gpu(tmp_path: Path) -> None:
    for gpu in ("NVIDIA H100", "NVIDIA H200"):
        rows = [kernel("torchembed", "forward", None, 25.6)]
        result = {"hardware": {"gpu": gpu}, "commit": "0123456789", "rows": rows}
        (tmp_path / f"{gpu}.json").write_text(json.dumps(result))
    with pytest.raises(ValueError, match="must hold one of NVIDIA H100, NVIDIA H200 in a table"):
        program.tables(tmp_path)


def test_a_page_needs_markers() -> None:
    with pytest.raises(ValueError, match="the page must hold the lines <!-- written"):
        program.with_tables("# torchembed\n", "")


def test_the_headline_is_of_the_run_in_which_the_peer_does_best(tmp_path: Path) -> None:
    usual = {"batch_per_gpu": 8192, "ids": "uniform", "max_rows": 8_000_000}
    for name, theirs in {"a": 12.0, "b": 9.0, "c": 10.0}.items():
        rows = [step("torchembed", 2.0, **usual), step("torchrec", theirs, **usual)]
        result = {"hardware": {"gpu": "NVIDIA H200"}, "commit": "0123456789", "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    written = program.headline(tmp_path)
    assert [x for x in written.splitlines() if x.startswith("| 8")] == [
        "| 8 H200 | 2.00 | 9.00 | 4.5 |"
    ]
    assert "b.json" in written
    assert "a.json" not in written
    assert "c.json" not in written


def test_the_headline_leaves_out_what_was_not_compared(tmp_path: Path) -> None:
    usual = {"batch_per_gpu": 8192, "ids": "uniform", "max_rows": 8_000_000}
    of_files = {
        "a": [step("torchembed", 2.0, **usual), step("torchrec", 9.0, **usual)],
        "b": [step("torchembed", 1.0, **usual)],
        "c": [step("torchembed", 1.0, **usual), step("torchrec", None, **usual)],
    }
    for name, rows in of_files.items():
        result = {"hardware": {"gpu": "NVIDIA H200"}, "commit": "0123456789", "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    lines = [x for x in program.headline(tmp_path).splitlines() if x.startswith("| 8")]
    assert lines == ["| 8 H200 | 2.00 | 9.00 | 4.5 |"]


def test_the_headline_has_a_column_for_tf32_where_it_was_measured(tmp_path: Path) -> None:
    usual = {"batch_per_gpu": 8192, "ids": "uniform", "max_rows": 8_000_000}
    for num_gpus, in_tf32 in {1: 3.0, 2: None}.items():
        rows = [
            step("torchembed", 2.0, **usual),
            step("torchembed_tf32", in_tf32, **usual),
            step("torchrec", 9.0, **usual),
        ]
        rows = [row | {"num_gpus": num_gpus} for row in rows]
        result = {"hardware": {"gpu": "NVIDIA H200"}, "commit": "0123456789", "rows": rows}
        (tmp_path / f"{num_gpus}.json").write_text(json.dumps(result))
    lines = [x for x in program.headline(tmp_path).splitlines() if x.startswith("| ")]
    assert lines[0].count("tf32") == 2
    assert lines[2:] == [
        "| 1 H200 | 2.00 | 3.00 | 9.00 | 4.5 |",
        "| 2 H200 | 2.00 |  | 9.00 | 4.5 |",
    ]
