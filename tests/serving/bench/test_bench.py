"""The load generator: its arithmetic, its schedule, and whole runs against real servers."""

import json
import re
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from bench.serving import swaps
from bench.serving.servers import main as compare_servers
from tests.support.server_processes import running_server
from tests.zoo.served_models import MODELS
from torchembed.serving.bench.__main__ import main
from torchembed.serving.bench.latencies import latencies, percentile
from torchembed.serving.bench.load import run_load
from torchembed.serving.bench.made_requests import MadeRequests
from torchembed.serving.models import deploy

pytest.importorskip("tritonclient.http")


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.005, 0.5, 0.501, 0.99, 0.999, 1.0)] == [
        1.0, 50.0, 51.0, 99.0, 100.0, 100.0,
    ]  # fmt: skip
    found = latencies([0.003, 0.001, 0.002])
    assert found == pytest.approx((2.0, 2.0, 3.0, 3.0, 3.0))


def test_a_load_without_a_rate_keeps_every_client_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def pass_time() -> None:
        nonlocal now
        now += 0.1

    # Each client's request lasts until all three have one, and 0.1 s by this clock.
    all_ask = threading.Barrier(3, pass_time, timeout=60)
    monkeypatch.setattr("torchembed.serving.bench.load.time.perf_counter", lambda: now)
    result = run_load(lambda: nullcontext(lambda _: all_ask.wait()), 3, [0, 1], seconds=0.15)
    assert (result.num_requests, result.num_failed) == (6, 0)
    assert result.seconds == 0.2
    assert result.latencies == pytest.approx((100.0,) * 5)


def test_latency_at_a_rate_counts_from_the_time_that_a_request_was_due() -> None:
    asked: list[int] = []

    def client(request: int) -> None:
        # The first one holds up all those behind it, which are late by what is left of it.
        time.sleep(0.3 if not asked else 0.0)
        asked.append(request)

    result = run_load(lambda: nullcontext(client), 1, list(range(5)), seconds=0.5, rate=100.0)
    assert asked == [n % 5 for n in range(50)]
    assert result.num_requests == 50
    # Requests due at 0, 10, ... 290 ms waited until 300 ms: their mean is 155 ms.
    assert result.latencies.mean * 50 / 30 >= 150
    assert result.latencies.max >= 300 and result.latencies.p50 >= 50


def test_failures_are_counted_and_the_first_is_told() -> None:
    def client(request: int) -> None:
        if request:
            raise ValueError("no")

    result = run_load(lambda: nullcontext(client), 1, [0, 1], seconds=0.05, rate=200.0)
    assert (result.num_requests, result.num_failed) == (5, 5)
    assert result.first_failure == "ValueError: no"
    with pytest.raises(RuntimeError, match="no request was answered, and 10 failed"):
        run_load(lambda: nullcontext(client), 1, [1], seconds=0.05, rate=200.0)


def test_requests_are_made_of_the_metadata() -> None:
    inputs = [
        {"name": "dense", "datatype": "FP32", "shape": [-1, 3]},
        {"name": "f", "datatype": "INT64", "shape": ["-1", "2"]},
        {"name": "g", "datatype": "INT64", "shape": [-1]},
        {"name": "g.lengths", "datatype": "INT32", "shape": [-1]},
        {"name": "g.weights", "datatype": "FP32", "shape": [-1]},
    ]
    request = MadeRequests(inputs, batch_size=5, num_ids=7, max_length=3).make()
    assert request["dense"].shape == (5, 3) and request["dense"].dtype == np.float32
    assert request["f"].shape == (5, 2) and request["f"].dtype == np.int64
    lengths = request["g.lengths"]
    assert lengths.shape == (5,) and lengths.dtype == np.int32 and lengths.max() <= 3
    assert request["g"].shape == request["g.weights"].shape == (lengths.sum(),)
    for name in ("f", "g"):
        assert request[name].min(initial=0) >= 0 and request[name].max(initial=0) < 7
    with pytest.raises(ValueError, match=r"input x must be INT64 or one of .*, got BYTES"):
        MadeRequests([{"name": "x", "datatype": "BYTES", "shape": [-1]}], batch_size=1, num_ids=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--url", "h:1", "--clients", "0"),
            "--clients: must be a whole number .*, got '0'",
        ),
        (("--url", "h:1", "--num-ids", "-1"), "--num-ids: must be a whole number .*, got '-1'"),
        (("--url", "h:1", "--rate", "0"), "--rate: must be a number above 0, got '0'"),
        (("--url", "h:1", "--seconds", "nan"), "--seconds: must be a number above 0, got 'nan'"),
        (("--url", "h:1", "--seconds", "x"), "--seconds: must be a number above 0, got 'x'"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--model", "m", *arguments])
    assert re.search(message, capsys.readouterr().err)


def test_what_cannot_be_measured_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--url", "h:1", "--batch-sizes", "1", "2"]
    for arguments, message in (
        ([], "give either --url or --in-process"),
        (sizes, "--batch-sizes must be one number with --url, got 1 2"),
        (["--in-process", str(tmp_path)], "torchembed.serving.bench: model must be one that "),
        (["--url", "127.0.0.1:1"], "torchembed.serving.bench: "),
    ):
        assert main(["--model", "m", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(message)


def test_a_server_and_a_model_without_one_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, models, output = MODELS["tasks"](), tmp_path / "models", tmp_path / "figures.json"
    deploy(case.model, models, name="m", version=1, examples=case.examples(4))
    common = ["--model", "m", "--num-ids", "30", "--seconds", "0.3", "--output", str(output)]
    config = tmp_path / "server.yaml"
    config.write_text("models: [{name: m, cache: {share: 1.0}}]\n")
    with running_server(models, tmp_path / "log", "--config", str(config)) as server:
        for protocol, url in (("http", server.http), ("grpc", server.grpc)):
            flags = ["--url", url, "--protocol", protocol, "--clients", "2"]
            metrics = ["--metrics", f"http://{server.http}/metrics"]
            assert main([*common, *flags, *metrics]) == 0
            figures = json.loads(output.read_text())
            load = figures["load"]
            assert load["num_failed"] == 0 and load["num_requests"] > 0
            assert 0 < load["latencies"]["p50"] <= load["latencies"]["p999"]
            stages = figures["milliseconds_by_stage"]
            assert stages["model"] > 0 and stages["lookup cache"] > 0
            assert figures["hit_rate"] > 0.9
            capsys.readouterr()
            servers = ["--servers", f"a={url}", f"b={url}", "--protocol", protocol]
            flags = ["--model", "m", "--num-ids", "30", "--batch-sizes", "2", "--clients", "2"]
            assert compare_servers([*servers, *flags, "--seconds", "0.1", "--rounds", "1"]) == 0
            header, first, second, ratios = capsys.readouterr().out.splitlines()
            assert header.split()[-1] == "failed"
            assert first.split()[:2] == ["2", "a"] and second.split()[:2] == ["2", "b"]
            assert first.split()[-1] == second.split()[-1] == "0"
            assert ratios.split()[:4] == ["2", "ratio", "to", "b"]
            # Rates are printed to a tenth, and their ratio to a hundredth.
            one, other = (float(row.split()[2]) for row in (first, second))
            least, most = (one - 0.05) / (other + 0.05), (one + 0.05) / (other - 0.05)
            assert least - 0.005 <= float(ratios.split()[4]) <= most + 0.005
    assert main([*common, "--in-process", str(models), "--batch-sizes", "2", "8"]) == 0
    sizes = [row["batch_size"] for row in json.loads(output.read_text())["in_process"]]
    assert sizes == [2, 8]
    assert main(common) == 2
    with pytest.raises(SystemExit):
        compare_servers(["--servers", "127.0.0.1:8000", "--model", "m"])
    assert "--servers must be NAME=HOST:PORT, got '127.0.0.1:8000'" in capsys.readouterr().err


def test_a_server_is_measured_while_dense_parts_and_versions_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setting = swaps.Setting(
        num_tables=2,
        num_rows=100,
        dim=4,
        dense_layers=(8,),
        over_layers=(8,),
        batch_size=2,
        num_clients=2,
        rate=10.0,
        seconds=1.0,
        swap_interval_seconds=0.05,
        load_interval_seconds=0.4,
        rounds=1,
    )
    assert swaps.main(setting) == 0
    first, header, *rows = capsys.readouterr().out.splitlines()
    # Layers of 13 to 8, 8 to 4, 4 and three products to 8, and 8 to 1, each with a bias.
    num_weights = 14 * 8 + 9 * 4 + 8 * 8 + 9
    assert first.startswith(f"{4 * num_weights} bytes of weights, {4 * 2 * 100 * 4} of rows; ")
    assert header.split()[:2] == ["changes", "number"]
    found = {row.split()[0]: row.split()[1:] for row in rows}
    assert list(found) == ["nothing", "swaps", "versions"]
    for name, (number, _, requests, failed, p50, p99, *_) in found.items():
        assert (requests, failed) == ("10", "0") and 0 < float(p50) <= float(p99)
        assert (int(number) > 0) == (name != "nothing")
    assert found["nothing"][6:] == ["1.00", "1.00-1.00"]
