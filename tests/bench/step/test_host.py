"""The host's time of a step is divided among its parts, without a rest."""

import json
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("tyro", reason="the bench needs tyro")
from bench.data.dlrm_dcnv2 import DenseSizes
from bench.step import host
from bench.step.host import LAUNCH, HostClock

SMALL = DenseSizes(13, (128,), (1,), 1, 4)


class _Calls:
    def outer(self) -> int:
        return self.inner() + 1

    def inner(self) -> int:
        return 1


def test_time_of_inner_calls_is_theirs_alone() -> None:
    clock, methods = HostClock(), {"outer": (_Calls, "outer"), "inner": (_Calls, "inner")}
    with clock.watching(methods):
        start = time.perf_counter_ns()
        assert _Calls().outer() == 2  # before the first step, which counts for none
        clock.begin_step()
        assert _Calls().outer() == 2
        elapsed = time.perf_counter_ns() - start
    (step,) = clock.steps
    assert set(step) == {"outer", "inner"}
    assert min(step.values()) > 0
    assert sum(step.values()) <= elapsed
    before = dict(step)
    assert _Calls().outer() == 2
    assert step == before


def test_an_error_leaves_the_methods_as_they_were() -> None:
    inner = _Calls.inner
    with pytest.raises(KeyError), HostClock().watching({"inner": (_Calls, "inner")}):
        raise KeyError
    assert _Calls.inner is inner


def test_percentiles() -> None:
    steps = [{"a": 1000 * n, "b": 500} for n in range(1, 101)]
    assert host.percentiles(steps, ["a"]) == {"median": 50.5, "p99": 99.0}
    assert host.percentiles(steps, ["a", "b"]) == {"median": 51.0, "p99": 99.5}


def test_parts_of_captured_steps_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    whole = host.measure
    monkeypatch.setattr(host, "measure", lambda *given: whole(*given, sizes=SMALL))
    output = tmp_path / "host.json"
    arguments = ["--batch-sizes", "2", "--max-rows", "10", "--num-steps", "5"]
    arguments += ["--precision", "fp32", "--output", str(output)]
    monkeypatch.setattr("sys.argv", ["host", *arguments])
    host.main()
    rows = {row["part"]: row for row in json.loads(output.read_text())["rows"]}
    assert rows.keys() >= host.methods_of(torch.device("cpu")).keys()
    assert rows[host.OTHERS]["median_us"] < rows["step"]["median_us"]
    assert 0 < rows[LAUNCH]["median_us"] <= rows[LAUNCH]["p99_us"]
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
