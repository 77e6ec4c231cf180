"""A server's process while what it stands on goes away, and while it is asked and ended."""

import dataclasses
import os
import signal
import socket
import subprocess
import threading
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.support.asked_servers import asked, expected, trained
from tests.support.kafka_brokers import running_brokers
from tests.support.killed_servers import serve_until_killed
from tests.support.redis_servers import redis_server
from tests.support.server_processes import command, running_server
from tests.support.source_tree import ROOT
from tests.support.store_processes import LIMIT_SECONDS, start
from tests.support.waiting import wait_until
from tests.zoo.served_models import NUM_ROWS
from torchembed.serving.__main__ import main, make_parser
from torchembed.serving.configuration import parse_address
from torchembed.serving.models import deploy, read_description
from torchembed.serving.server import config_of
from torchembed.stores import RocksDBStore, volatile_memory_bytes
from torchembed.training import ModelPublisher

pytest.importorskip("tritonclient.http")
pytest.importorskip("rocksdict")


def answers(client: Any, request: dict[str, np.ndarray], version: str, wanted: np.ndarray) -> bool:
    """True where the server answers by the version, and as is wanted."""
    import tritonclient.http

    found, answering = asked(client, tritonclient.http, request)
    return answering == version and np.allclose(found, wanted, atol=2e-6)


def test_updates_reach_answers_that_go_on_while_redis_is_away(tmp_path: Path) -> None:
    import tritonclient.http

    models, case, second = tmp_path / "models", trained(1), trained(2)
    examples = case.examples(5)
    request = case.request(examples)
    deploy(case.model, models, name="m", version=1, examples=case.examples(4))
    with (
        running_brokers() as brokers,
        redis_server() as redis,
        ModelPublisher(second.model, "m", brokers.addresses) as publisher,
    ):
        flags = ("--redis", f"redis://{redis.address}", "--kafka", brokers.addresses)
        rows = ("--persistent", str(tmp_path / "rows"))
        publisher.publish(2, whole=True)
        publisher.flush()
        with running_server(models, tmp_path / "log", *flags, *rows) as server:
            client = tritonclient.http.InferenceServerClient(server.http)
            wanted = expected(second, examples)
            is_updated = partial(answers, client, request, "2", wanted)
            wait_until(is_updated, server.log.read_text)
            redis.kill()
            assert is_updated()
            redis.start()
            assert is_updated()
            client.close()
            assert server.end() == 0


def test_requests_that_have_begun_are_answered_when_the_server_ends(tmp_path: Path) -> None:
    import tritonclient.http

    models, case = tmp_path / "models", trained(1)
    examples = case.examples(5)
    request, wanted = case.request(examples), expected(case, examples)
    deploy(case.model, models, name="m", version=1, examples=case.examples(4))
    answers: list[np.ndarray] = []
    refusals: list[str] = []

    def ask_until_refused(address: str) -> None:
        client: Any = tritonclient.http.InferenceServerClient(address)
        try:
            while True:
                answers.append(asked(client, tritonclient.http, request)[0])
        except (OSError, tritonclient.http.InferenceServerException) as error:
            refusals.append(f"{type(error).__name__}: {error}")
        finally:
            client.close()

    with running_server(models, tmp_path / "log") as server:
        threads = [
            threading.Thread(target=ask_until_refused, args=(server.http,)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(answers) >= 30)
        assert server.end() == 0
        for thread in threads:
            thread.join(LIMIT_SECONDS)
    assert len(refusals) == 3
    # Refused before it is read, or named as ending; a half answer would be another error.
    assert not [text for text in refusals if "Incomplete" in text or "BadStatus" in text], refusals
    for found in answers:
        np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_rows_that_another_process_has_open_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models, rows, case = tmp_path / "models", tmp_path / "rows", trained(1)
    deploy(case.model, models, name="m", version=1, examples=case.examples(4))
    with RocksDBStore(rows):
        assert main(["--models", str(models), "--persistent", str(rows)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("torchembed.serving: ") and str(rows) in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--models or --config must be given"),
        (["--ps-json", "ps.json"], "--models must name the folder of models"),
        (["--models", "m", "--redis", "http://h:1"], "url must be redis://"),
        (["--models", "m", "--redis", "redis://h:1/3"], "without a number of a database"),
    ],
)
def test_flags_that_cannot_be_are_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("torchembed.serving: ") and message in line


def test_memory_is_computed_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models, case = tmp_path / "models", trained(1)
    deploy(case.model, models, name="m", version=1, examples=case.examples(4))
    assert main(["--models", str(models), "--check"]) == 0
    *parts, total = capsys.readouterr().out.splitlines()
    sizes = [int(line.split()[0].replace(",", "")) for line in parts]
    assert sum(sizes) == int(total.split()[0].replace(",", ""))
    for table in read_description(models / "m" / "1").tables:
        (size,) = (line.split()[0] for line in parts if line.endswith(f"rows of m/{table.name}"))
        assert int(size.replace(",", "")) == volatile_memory_bytes(table.num_rows, table.dim * 4)
    config = tmp_path / "server.yaml"
    config.write_text("max_memory_bytes: 1000\n")
    assert main(["--models", str(models), "--config", str(config), "--check"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "bytes of memory, and max_memory_bytes allows 1,000" in line


def test_brokers_that_do_not_answer_end_the_server_by_one_line(tmp_path: Path) -> None:
    models, case, config = tmp_path / "models", trained(1), tmp_path / "server.yaml"
    deploy(case.model, models, name="m", version=1, examples=case.examples(4))
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        # It takes connections and never answers; another server would end them at once.
        config.write_text(f"updates: {{brokers: ['{address}'], start_timeout_seconds: 0.5}}\n")
        ended = subprocess.run(
            command(models, "--config", str(config)),
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            check=False,
        )
    assert ended.returncode == 2
    assert ended.stdout == ""
    *_, line = ended.stderr.splitlines()
    assert line.startswith(
        f"torchembed.serving: brokers must answer within 0.5 s, and {address} did not"
    )
    assert "Traceback" not in ended.stderr


def test_rows_are_the_trainers_where_a_server_is_killed_before_it_commits_them(
    tmp_path: Path,
) -> None:
    import tritonclient.http

    models, case, second = tmp_path / "models", trained(1), trained(2)
    deploy(case.model, models, name="m", version=1, examples=case.examples(4))
    # A sample for each row.
    dense, features = case.examples(NUM_ROWS)
    ids = torch.arange(NUM_ROWS).repeat(len(case.features))
    examples = dense, dataclasses.replace(features, values=ids)
    request = case.request(examples)
    with (
        running_brokers() as brokers,
        ModelPublisher(second.model, "m", brokers.addresses) as publisher,
    ):
        publisher.publish(2, whole=True)
        publisher.flush()
        flags = ("--kafka", brokers.addresses, "--persistent", str(tmp_path / "rows"))
        killed = start(serve_until_killed, command(models, *flags)[3:])
        killed.process.join(LIMIT_SECONDS)
        assert killed.process.exitcode == -signal.SIGKILL
        with torch.no_grad():
            for parameter in second.model.parameters():
                parameter.mul_(0.5)
        publisher.publish(3, whole=True)
        publisher.flush()
        with running_server(models, tmp_path / "log", *flags) as server:
            client = tritonclient.http.InferenceServerClient(server.http)
            wanted = expected(second, examples)
            is_updated = partial(answers, client, request, "3", wanted)
            wait_until(is_updated, server.log.read_text)
            with urllib.request.urlopen(f"http://{server.http}/metrics") as answer:
                families = list(text_string_to_metric_families(answer.read().decode()))
            client.close()
            assert server.end() == 0
    dropped = {
        sample.labels["reason"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "torchembed_update_rejected_total"
    }
    # They had been applied, and were not committed.
    assert dropped["repeated"] > 0


def test_a_server_listens_on_loopback_alone_unless_told(tmp_path: Path) -> None:
    given = make_parser().parse_args(["--models", str(tmp_path)])
    config = config_of(given, given.models)
    for address in (config.http_address, config.grpc_address):
        assert address is not None and parse_address("address", address)[0] == "127.0.0.1"
    models, case = tmp_path / "models", trained(1)
    deploy(case.model, models, name="m", version=1, examples=case.examples(4))
    with running_server(models, tmp_path / "log") as server:
        sockets = psutil.Process(server.process.pid).net_connections(kind="inet")
        listening = [s.laddr for s in sockets if s.status == psutil.CONN_LISTEN]
        # gRPC's socket has IPv4 addresses as IPv6 maps them.
        found = {f"{host.removeprefix('::ffff:')}:{port}" for host, port in listening}
        assert found == {server.http, server.grpc}
        assert server.end() == 0
