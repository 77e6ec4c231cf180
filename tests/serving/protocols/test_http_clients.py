"""Clients over HTTP that send too much, too slowly or without end, on sockets of the test's own."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.served_models import EchoModel, HeldModel, MemoryDirectory
from tests.support.waiting import wait_until
from torchembed.serving.protocols import ClientTimeouts, HttpServer, RequestLimits, ServerOptions

LIMITS = RequestLimits(
    max_body_bytes=2000,
    max_json_bytes=1000,
    max_header_bytes=600,
    max_tensors=3,
    max_elements=100,
    max_requests_at_once=2,
    max_bytes_at_once=3000,
    max_connections=6,
)
SECONDS = 0.5
IDLE_SECONDS = 2.0
CUT_OFF_SECONDS = 120.0
"""By when a test fails where a server keeps a connection open."""
PATH = "/v2/models/echo/infer"
BODY = json.dumps(
    {"inputs": [{"name": "int8", "datatype": "INT8", "shape": [1, 2], "data": [1, 2]}]}
).encode()


@contextlib.contextmanager
def running(
    directory: MemoryDirectory | None = None,
    limits: RequestLimits = LIMITS,
    timeouts: ClientTimeouts | None = None,
) -> Iterator[HttpServer]:
    options = ServerOptions(limits=limits, timeouts=timeouts or ClientTimeouts())
    server = HttpServer(directory or MemoryDirectory().with_loaded(EchoModel()), options=options)
    server.start()
    try:
        yield server
    finally:
        server.stop(0)


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with running() as server:
        yield server


@contextlib.contextmanager
def connected(server: HttpServer, sent: bytes = b"") -> Iterator[socket.socket]:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=CUT_OFF_SECONDS) as client:
        client.sendall(sent)
        yield client


def request(body: bytes = BODY, path: str = PATH, **headers: str) -> bytes:
    named = {"host": "x", "content_length": str(len(body)), **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in named.items() if value]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + body


def rest(client: socket.socket) -> bytes:
    """What comes until the server closes the connection, however it does."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while some := client.recv(1 << 16):
            received += some
    return received


def reply(client: socket.socket) -> bytes:
    """One answer, of a connection that stays open."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += some if (some := client.recv(1 << 16)) else pytest.fail(f"got {received!r}")
    head, _, body = received.partition(b"\r\n\r\n")
    fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
    while len(body) < int(fields[b"content-length"]):
        body += some if (some := client.recv(1 << 16)) else pytest.fail(f"got {received!r}")
    return head + b"\r\n\r\n" + body


def status_and_error(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def answered(server: HttpServer, body: bytes = BODY, **headers: str) -> tuple[int, str]:
    """The status of an answer, and its error, empty where there is none."""
    with connected(server, request(body, connection="close", **headers)) as client:
        head, _, text = rest(client).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(text).get("error", "")


def infer_body(**changed: object) -> bytes:
    tensor = {"name": "int8", "datatype": "INT8", "shape": [1, 2], "data": [1, 2], **changed}
    return json.dumps({"inputs": [tensor]}).encode()


def test_a_body_of_the_limits_is_answered(server: HttpServer) -> None:
    padded = BODY + b" " * (LIMITS.max_json_bytes - len(BODY))
    assert answered(server, padded) == (200, "")
    assert answered(server, infer_body(shape=[50, 2], data=[1] * 100)) == (200, "")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (BODY + b" " * 2000, "a body must have at most 2000 bytes"),
        (BODY + b" " * (1001 - len(BODY)), "JSON must have at most 1000 bytes, got 1001"),
        (infer_body(shape=[51, 2], data=[1]), "'int8' must have at most 100 elements"),
        (
            json.dumps({"inputs": [{"name": f"i{n}"} for n in range(4)]}).encode(),
            "inputs must be at most 3, got 4",
        ),
    ],
    ids=["body", "json", "elements", "tensors"],
)
def test_what_is_too_large_is_a_413(server: HttpServer, body: bytes, error: str) -> None:
    status, found = answered(server, body)
    assert status == 413 and error in found
    assert answered(server) == (200, "")


def test_a_body_that_is_announced_as_too_large_is_refused_before_it_is_sent(
    server: HttpServer,
) -> None:
    with connected(server, request(b"", content_length="2001")) as client:
        status, error = status_and_error(reply(client))
    assert (status, error) == (413, "a body must have at most 2000 bytes")


def test_a_body_in_chunks_without_end_is_refused_at_the_limit(server: HttpServer) -> None:
    head = request(b"", content_length="", transfer_encoding="chunked")
    with connected(server, head) as client:
        for _ in range(3):
            client.sendall(b"320\r\n" + b" " * 800 + b"\r\n")
        status, error = status_and_error(reply(client))
    assert (status, error) == (413, "a body must have at most 2000 bytes")


@pytest.mark.parametrize("part", ["line", "field", "many fields", "field without end"])
def test_large_header_fields_are_a_431_or_end_the_connection(server: HttpServer, part: str) -> None:
    sent = {
        "line": request(path="/v2/" + "x" * 600),
        "field": request(x_long="x" * 600),
        "many fields": request(**{f"x_{n}": "yz" for n in range(100)}),
        "field without end": b"GET /v2 HTTP/1.1\r\nx: ",
    }[part]
    with connected(server) as client:
        # The server may close while this sends.
        with contextlib.suppress(ConnectionError):
            client.sendall(sent)
            while part == "field without end":
                client.sendall(b"y" * 100)
        answer = rest(client)
    if part != "field without end":
        assert status_and_error(answer) == (
            431,
            "line and header fields must have at most 600 bytes",
        )
    assert answered(server) == (200, "")


def test_more_requests_and_bytes_than_may_be_under_way_are_a_503() -> None:
    held = HeldModel(EchoModel())
    announced = request(b"", content_length="2000")
    with running(MemoryDirectory().with_loaded(held)) as server:
        with connected(server, request()) as first:
            assert held.begun.acquire(timeout=60)
            with connected(server, announced) as second:
                wait_until(lambda: _num_under_way(server) == 2)
                error = "2 requests are under way, as many as the server takes; ask again later"
                assert answered(server) == (503, error)
            # It is told that the client of the second is gone.
            held.let_go.set()
            assert reply(first).startswith(b"HTTP/1.1 200")
        wait_until(lambda: answered(server) == (200, ""))
        with connected(server, announced), connected(server, announced) as second:
            error = "requests under way have more than 3000 bytes together; ask again later"
            assert status_and_error(reply(second)) == (503, error)
        wait_until(lambda: answered(server) == (200, ""))


def test_connections_above_the_limit_are_closed(server: HttpServer) -> None:
    wait_until(lambda: _num_open(server) == 0)
    with contextlib.ExitStack() as clients:
        for _ in range(LIMITS.max_connections):
            client = clients.enter_context(connected(server, request()))
            assert reply(client).startswith(b"HTTP/1.1 200")
        with connected(server) as client:
            assert rest(client) == b""
    wait_until(lambda: _is_answered(server))


def _is_answered(server: HttpServer) -> bool:
    try:
        return answered(server) == (200, "")
    except (ConnectionError, IndexError):
        return False


@contextlib.contextmanager
def impatient(**seconds: float) -> Iterator[HttpServer]:
    """A server with time-outs, others than these as they are by default."""
    with running(limits=RequestLimits(), timeouts=ClientTimeouts(**seconds)) as server:
        yield server


def test_those_that_send_slowly_are_cut_off_and_others_are_answered() -> None:
    with impatient(receive_seconds=SECONDS) as server:
        check_slow_senders(server)


def check_slow_senders(server: HttpServer) -> None:
    done = threading.Event()
    answers: dict[str, bytes] = {}

    def send(name: str, begun: bytes, piece: bytes) -> None:
        """Send a piece ten times in each time-out, until the connection ends."""
        with connected(server, begun) as client:
            answers[name] = b""
            client.settimeout(SECONDS / 10)
            with contextlib.suppress(ConnectionError):
                while not done.is_set():
                    with contextlib.suppress(TimeoutError):
                        if not (some := client.recv(1 << 16)):
                            return
                        answers[name] += some
                    client.sendall(piece)
            if done.is_set():
                answers[name] += b"was never cut off"
                return
            # The connection may have ended between its answer and the next piece.
            client.settimeout(CUT_OFF_SECONDS)
            answers[name] += rest(client)

    slow = {
        "line": (b"POST /v2", b"x"),
        "fields": (b"GET /v2 HTTP/1.1\r\nhost: x\r\n", b"x: y\r\n"),
        "body": (request(b"", content_length="2000"), b" "),
        "chunks": (
            request(b"", content_length="", transfer_encoding="chunked"),
            b"1\r\n \r\n",
        ),
        "silent body": (request(b"", content_length="2000"), b""),
    }
    threads = [threading.Thread(target=send, args=(name, *parts)) for name, parts in slow.items()]
    for thread in threads:
        thread.start()
    num_answered = 0
    while any(thread.is_alive() for thread in threads):
        assert answered(server) == (200, "")
        num_answered += 1
        if num_answered == 10_000:
            done.set()
    assert num_answered > 0
    assert not [name for name, answer in answers.items() if answer.endswith(b"cut off")]
    for name in ("line", "fields"):
        status, error = status_and_error(answers[name])
        assert (status, error) == (408, f"the request did not end in {SECONDS} s")
    for name in ("body", "chunks", "silent body"):
        assert answers[name] == b""


def test_connections_that_ask_nothing_are_closed() -> None:
    with (
        impatient(idle_seconds=IDLE_SECONDS) as server,
        connected(server) as silent,
        connected(server, request()) as asking,
    ):
        assert rest(silent) == b""
        assert rest(asking).startswith(b"HTTP/1.1 200")


def test_those_that_do_not_read_are_cut_off() -> None:
    with impatient(send_seconds=SECONDS) as server:
        check_a_client_that_does_not_read(server)


def check_a_client_that_does_not_read(server: HttpServer) -> None:
    values = np.zeros((1 << 20, 2), np.int64)
    tensor = {
        "name": "int64",
        "datatype": "INT64",
        "shape": list(values.shape),
        "parameters": {"binary_data_size": values.nbytes},
    }
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    body = header.encode() + values.tobytes()
    sent = request(body, inference_header_content_length=str(len(header)))
    with connected(server, sent) as client:
        assert client.recv(1).startswith(b"H")
        # Not a byte more is read until the server has given up on this client alone.
        wait_until(lambda: _num_open(server) == 0)
        assert len(rest(client)) < values.nbytes
    assert answered(server) == (200, "")


def _num_under_way(server: HttpServer) -> int:
    return server._admission._num_requests


def _num_open(server: HttpServer) -> int:
    return len(server._server.server_state.connections)  # type: ignore[union-attr]
