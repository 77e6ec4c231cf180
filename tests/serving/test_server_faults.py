"""A server's process while what it stands on goes away, and while it is asked and ended."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.asked_servers import asked, expected, trained
from tests.support.kafka_brokers import running_brokers
from tests.support.redis_servers import redis_server, wait_until
from tests.support.server_processes import running_server
from torchembed.serving.__main__ import main
from torchembed.serving.models import deploy, read_description
from torchembed.stores import RocksDBStore, volatile_memory_bytes
from torchembed.training import ModelPublisher

pytest.importorskip("tritonclient.http")
pytest.importorskip("rocksdict")


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

            def is_updated() -> bool:
                found, version = asked(client, tritonclient.http, request)
                return version == "2" and np.allclose(found, wanted, atol=2e-6)

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
            thread.join(timeout=60)
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
