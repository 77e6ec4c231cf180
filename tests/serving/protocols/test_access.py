"""Who may ask, over what, what is logged of it, and how requests under way end."""

import contextlib
import http.client
import json
import logging
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.support.certificates import Certificate, certificate
from tests.support.inference_cases import Client
from tests.support.served_models import (
    EchoModel,
    HeldModel,
    MemoryDirectory,
    ScoringModel,
    scoring_inputs,
)
from tests.support.waiting import wait_until
from torchembed.serving.protocols import GrpcServer, HttpServer, ServerOptions, TlsFiles

TOKEN = "only-for-friends"
CASES = ("http", "grpc")


class Served(NamedTuple):
    server: HttpServer | GrpcServer
    client: Client
    held: HeldModel


@contextlib.contextmanager
def serving(
    protocol: str, options: ServerOptions | None = None, **of_client: Any
) -> Iterator[Served]:
    held = HeldModel(EchoModel("held"))
    directory = MemoryDirectory().with_loaded(EchoModel(), ScoringModel(), held)
    is_http = protocol == "http"
    server = (HttpServer if is_http else GrpcServer)(directory, options=options)
    server.start()
    module = tritonclient.http if is_http else tritonclient.grpc
    try:
        connection = module.InferenceServerClient(server.address, **of_client)
        yield Served(server, Client(module, connection), held)
        connection.close()
    finally:
        held.let_go.set()
        server.stop(0)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certificate(tmp_path_factory.mktemp("tls"), "server", "IP:127.0.0.1")


def ids(client: Client) -> list[Any]:
    return client.tensors(scoring_inputs(4))


def refusal(client: Client, **headers: str) -> str:
    with pytest.raises(client.module.InferenceServerException) as caught:
        client.connection.infer("scores", ids(client), headers=headers)
    return str(caught.value)


@pytest.mark.parametrize("protocol", CASES)
def test_tls_is_spoken_and_nothing_else(protocol: str, own: Certificate) -> None:
    options = ServerOptions(tls=TlsFiles(certificate=own.file, key=own.key))
    trusting: dict[str, Any] = {
        "http": {
            "ssl": True,
            "ssl_context_factory": lambda: ssl.create_default_context(cafile=str(own.file)),
        },
        "grpc": {"ssl": True, "root_certificates": str(own.file)},
    }
    with serving(protocol, options, **trusting[protocol]) as (server, client, _):
        assert client.connection.infer("scores", ids(client)).as_numpy("score").shape == (4, 1)
        if protocol == "http":
            strict = http.client.HTTPSConnection(server.address, timeout=60)
            with pytest.raises(ssl.SSLCertVerificationError):
                strict.request("GET", "/v2")
            plain = http.client.HTTPConnection(server.address, timeout=60)
            plain.request("GET", "/v2")
            with pytest.raises((ConnectionError, http.client.HTTPException)):
                plain.getresponse()
        else:
            for channel in (
                grpc.insecure_channel(server.address),
                grpc.secure_channel(server.address, grpc.ssl_channel_credentials()),
            ):
                call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
                with pytest.raises(grpc.RpcError) as caught:
                    call(b"", timeout=60)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
                channel.close()
        # Those who were refused kept nobody else out.
        assert client.connection.is_server_live()


@pytest.mark.parametrize("server_class", [HttpServer, GrpcServer])
def test_a_certificate_that_is_none_is_refused_at_the_start(
    server_class: type[HttpServer] | type[GrpcServer], tmp_path: Path, own: Certificate
) -> None:
    with pytest.raises(ValueError, match=r"tls certificate must be a PEM file, and .* is none"):
        TlsFiles(certificate=tmp_path / "absent", key=own.key)
    (tmp_path / "broken").write_text("no certificate")
    options = ServerOptions(tls=TlsFiles(certificate=tmp_path / "broken", key=own.key))
    with pytest.raises(OSError, match=r"PEM|certificate|cannot listen"):
        server_class(MemoryDirectory(), options=options).start()


@pytest.mark.parametrize("protocol", CASES)
def test_all_but_health_is_for_those_who_have_the_token(protocol: str) -> None:
    assert TOKEN not in repr(ServerOptions(token=TOKEN))
    with serving(protocol, ServerOptions(token=TOKEN)) as (_, client, _):
        connection = client.connection
        assert connection.is_server_live() and connection.is_server_ready()
        message = "must carry the token: authorization: bearer <token>"
        wrong = ("Bearer wrong", "Bearer", f"Basic {TOKEN}", f"Bearer  {TOKEN}", f"Bearer {TOKEN}x")
        for header in wrong:
            assert message in refusal(client, authorization=header).lower()
        assert message in refusal(client).lower()
        for ask in (
            connection.get_server_metadata,
            lambda: connection.get_model_metadata("scores"),
            connection.get_model_repository_index,
            lambda: connection.load_model("scores"),
            lambda: connection.unload_model("scores"),
            connection.get_inference_statistics,
        ):
            with pytest.raises(client.module.InferenceServerException, match="must carry the tok"):
                ask()
        for scheme in ("Bearer", "bearer"):
            headers = {"authorization": f"{scheme} {TOKEN}"}
            answer = connection.infer("scores", ids(client), headers=headers)
            assert answer.as_numpy("score").shape == (4, 1)


def test_metrics_are_for_those_who_have_the_token_and_a_401_says_how() -> None:
    with serving("http", ServerOptions(token=TOKEN)) as (server, _, _):
        connection = http.client.HTTPConnection(server.address, timeout=60)
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        assert response.status == 401 and response.getheader("www-authenticate") == "Bearer"
        assert "error" in json.loads(response.read())
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        assert connection.getresponse().status == 200
        connection.close()


@pytest.mark.parametrize("protocol", CASES)
def test_each_request_is_a_line_of_the_access_log(
    protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = scoring_inputs(4)  # all of whose ids have rows
    inputs["id_3"][:3], inputs["id_4"][0] = -1, 1000
    with (
        caplog.at_level(logging.INFO, logger="torchembed.serving.access"),
        serving(protocol, ServerOptions(token=TOKEN)) as (_, client, _),
    ):
        headers = {"authorization": f"Bearer {TOKEN}"}
        client.connection.infer("scores", client.tensors(inputs), headers=headers)
        with pytest.raises(client.module.InferenceServerException):
            client.connection.infer("absent\nmodel", ids(client), headers=headers)
        refusal(client)
        assert client.connection.is_server_live()
        names = ["torchembed.serving.access"]
        wait_until(lambda: len([r for r in caplog.records if r.name in names]) == 4)
    written = [r.getMessage() for r in caplog.records if r.name in names]
    assert not any("\n" in line or TOKEN in line for line in written)
    answered, unknown, refused, live = (json.loads(line) for line in written)
    is_http = protocol == "http"
    for line in (answered, unknown, refused, live):
        assert line["protocol"] == protocol
        assert "127.0.0.1:" in line["client"]
        assert line["seconds"] >= 0 and line["time"] > 1.7e9
    assert answered["call"] == ("POST /v2/models/scores/infer" if is_http else "ModelInfer")
    assert answered["status"] == (200 if is_http else "OK")
    assert answered["request_bytes"] > sum(array.nbytes for array in inputs.values())
    assert answered["response_bytes"] > 4 * (1 + 4) * 4
    assert (answered["model"], answered["version"]) == ("scores", "1")
    assert answered["num_default_rows"] == 4
    assert "error" not in answered
    assert unknown["status"] == (404 if is_http else "NOT_FOUND")
    assert unknown["error"] == "there is no model 'absent\\nmodel'"
    assert refused["status"] == (401 if is_http else "UNAUTHENTICATED")
    assert refused["request_bytes"] == 0  # refused before it was read
    assert live["call"] == ("GET /v2/health/live" if is_http else "ServerLive")


@pytest.mark.parametrize("protocol", CASES)
def test_requests_under_way_are_answered_and_new_ones_refused_at_the_end(protocol: str) -> None:
    with serving(protocol) as (server, client, held):
        tensors = client.tensors({"int8": np.array([[1, 2]], np.int8)})
        results: list[Any] = []
        asking = threading.Thread(
            target=lambda: results.append(_asked_anew(client, server, tensors))
        )
        asking.start()
        assert held.begun.acquire(timeout=60)
        assert client.connection.is_server_ready()
        server.refuse_new()
        assert client.connection.is_server_live() and not client.connection.is_server_ready()
        assert "the server is about to end" in refusal(client)
        stopping = threading.Thread(target=server.stop, args=(60.0,))
        stopping.start()
        held.let_go.set()
        asking.join(timeout=60)
        stopping.join(timeout=60)
        assert not stopping.is_alive()
        assert results[0].as_numpy("int8.out").tolist() == [[1, 2]]
        with pytest.raises((OSError, client.module.InferenceServerException)):
            client.connection.is_server_ready()


@pytest.mark.parametrize("protocol", CASES)
def test_requests_that_do_not_end_are_cut_off_when_the_grace_is_over(protocol: str) -> None:
    with serving(protocol) as (server, client, held):
        tensors = client.tensors({"int8": np.array([[1, 2]], np.int8)})
        failures: list[Exception] = []

        def ask() -> None:
            try:
                _asked_anew(client, server, tensors)
            except Exception as error:  # noqa: BLE001 - looked at below
                failures.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        assert held.begun.acquire(timeout=60)
        server.stop(0.1)
        asking.join(timeout=60)
        assert len(failures) == 1 and not held.let_go.is_set()


def _asked_anew(client: Client, server: HttpServer | GrpcServer, tensors: list[Any]) -> Any:
    """An answer of model ``held``, over a connection of its own."""
    connection = client.module.InferenceServerClient(server.address)
    try:
        return connection.infer("held", tensors)
    finally:
        connection.close()
