"""The planner's cost model predicts what was measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import costs

MAX_ERROR = 0.25
# Over 8 H200, in CUDA graphs: bytes of a rank and microseconds.
ALL_TO_ALL = [(3.4e6, 48), (6.8e6, 56), (13.6e6, 70), (27e6, 110), (54.5e6, 185), (109e6, 326)]
ALL_REDUCE = [(32e6, 206), (64e6, 355)]


def wire(collective: str, num_bytes: float, us: float) -> dict[str, Any]:
    return {
        "bench": "wires", "collective": collective, "gpu": "NVIDIA H200", "num_gpus": 8,
        "bytes": num_bytes, "microseconds": us,
    }  # fmt: skip


WIRES = [
    *(wire("all-to-all", *figures) for figures in ALL_TO_ALL),
    *(wire("all-reduce", *figures) for figures in ALL_REDUCE),
]


def test_stages_are_predicted() -> None:
    found = costs.predictions([*WIRES, *costs.stored_rows(costs.RESULTS)])
    stages = {(e.what.split()[1], " ".join(e.what.split()[5:])) for e in found if "step" in e.what}
    assert {gpu for gpu, _ in stages} == {"H100", "H200"}
    on_several = {"exchange", "mean"}
    alone = {"lookup", "dense forward", "dense backward", "row update", "dense update"}
    assert {stage for gpu, stage in stages if gpu == "H100"} >= alone
    assert {stage for gpu, stage in stages if gpu == "H200"} >= alone | on_several
    for each in found:
        assert abs(each.predicted / each.measured - 1) <= MAX_ERROR, each


def test_a_fit_finds_what_made_the_figures() -> None:
    exact = [costs.Prediction("", size, 5e-6 + size / 2e12, 0.0) for size in (1e6, 1e8, 3e9)]
    fixed, rate = costs.fitted(exact)
    assert fixed == pytest.approx(5e-6)
    assert rate == pytest.approx(2e12)


def test_bench_prints_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = {
        "bench": "kernels", "system": "torchembed", "stage": "update", "batch_per_gpu": 8192,
        "ids": "uniform", "optimizer": "Adagrad", "microseconds": 1245.0,
    }  # fmt: skip
    unknown = update | {"gpu": "another"}
    others = [update | {"stage": "backward"}, update | {"system": "FBGEMM"}, unknown]
    stored = {"hardware": {"gpu": "NVIDIA H100"}, "rows": [update, *others, *WIRES]}
    (tmp_path / "a.json").write_text(json.dumps(stored))
    monkeypatch.setattr("sys.argv", ["costs", "--results", str(tmp_path)])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    costs.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(WIRES) + 2
    assert lines[0].startswith("H100 update 8192 uniform Adagrad")
    assert lines[-2].startswith("all-     fits ")
    assert lines[-1].startswith("off by ")
