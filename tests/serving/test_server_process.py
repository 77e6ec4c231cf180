"""A server, from the trained model to answers over its protocols."""

import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from tests.support.asked_servers import asked, expected, trained
from tests.support.server_processes import running_server
from tests.support.source_tree import ROOT, run_python_or_fail
from torchembed.serving.__main__ import main
from torchembed.serving.models import deploy

pytest.importorskip("tritonclient.http")
pytest.importorskip("rocksdict")


def test_a_trained_model_is_deployed_served_and_replaced(tmp_path: Path) -> None:
    import tritonclient.grpc
    import tritonclient.http

    models, first, second = tmp_path / "models", trained(1), trained(2)
    examples = first.examples(5)
    request = first.request(examples)
    deploy(first.model, models, name="m", version=1, examples=first.examples(4))
    flags = ("--persistent", str(tmp_path / "rows"))
    with running_server(models, tmp_path / "log", *flags) as server:
        http = tritonclient.http.InferenceServerClient(server.http)
        grpc = tritonclient.grpc.InferenceServerClient(server.grpc)
        assert http.is_server_ready() and grpc.is_model_ready("m")
        for client, protocol in ((http, tritonclient.http), (grpc, tritonclient.grpc)):
            found, version = asked(client, protocol, request)
            np.testing.assert_allclose(found, expected(first, examples), atol=2e-6)
            assert version == "1"
        deploy(second.model, models, name="m", version=2, examples=first.examples(4))
        http.load_model("m")
        found, version = asked(http, tritonclient.http, request)
        np.testing.assert_allclose(found, expected(second, examples), atol=2e-6)
        assert version == "2"
        wanted = json.dumps({"parameters": {"roll_back": True}}).encode()
        load = f"http://{server.http}/v2/repository/models/m/load"
        assert urllib.request.urlopen(load, wanted).status == 200
        assert asked(http, tritonclient.http, request)[1] == "1"
        for number in ("2", "1", "2"):
            policy = {"version_policy": {"specific": {"versions": [int(number)]}}}
            grpc.load_model("m", config=json.dumps(policy))
            assert asked(http, tritonclient.http, request)[1] == number
        http.unload_model("m")
        with pytest.raises(Exception, match="model m is not loaded: unloaded"):
            asked(http, tritonclient.http, request)
        http.close()
        grpc.close()
        assert server.model == "m, version 1"
        assert server.end() == 0
    # The rows of version 2 are in RocksDB, and are not loaded again.
    with running_server(models, tmp_path / "log", *flags) as server:
        http = tritonclient.http.InferenceServerClient(server.http)
        found, _ = asked(http, tritonclient.http, request)
        np.testing.assert_allclose(found, expected(second, examples), atol=2e-6)
        http.close()


STARTED = """
import gc, runpy, sys

sys.argv += ["--no-such-flag"]
try:
    runpy.run_module("torchembed.serving", run_name="__main__")
except SystemExit as error:
    print(error.code, gc.get_freeze_count(), len(gc.get_objects()), sys.getswitchinterval())
"""


def test_a_servers_threads_wait_for_no_collection_of_modules_and_not_long_for_each_other() -> None:
    found = run_python_or_fail("-c", STARTED, cwd=ROOT).split()
    code, num_frozen, num_left = map(int, found[:3])
    assert code == 2
    assert num_frozen > 10 * num_left
    assert float(found[3]) == pytest.approx(1e-4)


def test_what_keeps_a_server_from_starting_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed_start(*flags: str) -> str:
        assert (
            main(
                ["--models", str(models), "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", *flags]
            )
            == 2
        )
        written = capsys.readouterr()
        (line,) = written.err.splitlines()
        assert written.out == "" and line.startswith("torchembed.serving: ")
        return line

    case, models = trained(1), tmp_path / "models"
    deploy(case.model, models, name="m", version=1, examples=case.examples(4))
    config = tmp_path / "server.yaml"
    config.write_text("max_memory_bytes: 1000\nmodels: [{name: m}]\n")
    line = failed_start("--config", str(config))
    assert "bytes of memory, and max_memory_bytes allows 1,000" in line
    config.write_text("models: [{name: m, cache: {rows: 0}}]\n")
    assert "models[0].cache.rows must be at least 1, got 0" in failed_start("--config", str(config))
    config.write_text("models: [{name: absent}]\n")
    assert "absent has no version there" in failed_start("--config", str(config))
    (models / "m" / "1" / "dense.safetensors").write_bytes(b"x" * 100)
    assert "is corrupt: deploy again" in failed_start()
