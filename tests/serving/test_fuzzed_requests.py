"""Requests that went wrong, to one server: each is refused as its sender's fault, and a right one
is answered behind it."""

import contextlib
import copy
import http.client
import json
import random
import socket
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fuzzed_messages import NUM_FUZZED
from tests.support.waiting import wait_until
from tests.zoo.served_models import MODELS
from torchembed.serving.configuration import ServerConfig
from torchembed.serving.models import deploy
from torchembed.serving.protocols.grpc_messages import ModelInferRequest
from torchembed.serving.server import Server

MODEL, PATH = "clicks", "/v2/models/clicks/infer"
SERVICE = "/inference.GRPCInferenceService/"
CODES = grpc.StatusCode
# The rest is a fault of the sender's; UNIMPLEMENTED is of extensions that this server has not.
REFUSALS = {
    CODES.INVALID_ARGUMENT,
    CODES.NOT_FOUND,
    CODES.RESOURCE_EXHAUSTED,
    CODES.UNIMPLEMENTED,
}
fuzzing = settings(
    max_examples=max(20, NUM_FUZZED // 100),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

STRANGE: list[Any] = [
    *(None, True, -1, 0, 1, 3, 2**31, 2**63 - 1, 2**63, 2**64, 10**400, -(2**63), 0.5, 1e308),
    *(float("nan"), float("inf"), "", "x", "\ud800", "a\x00b", "INT64", "INT8", "FP16", "BF16"),
    *("BYTES", "BOOL", "int64", [], [[]], [[[]]], {}, [1, [2]], ["1"], [None], "f0", "dense"),
    *(MODEL, "x" * 3000, [0] * 1500),
]
strange = st.sampled_from(STRANGE) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


class Fuzzed(NamedTuple):
    server: Server
    channel: grpc.Channel
    arrays: dict[str, np.ndarray]

    @property
    def http(self) -> str:
        assert self.server.http is not None
        return self.server.http.address

    def totals(self) -> Counter[str]:
        """Sums of the server's metrics over their labels but the protocol."""
        sums: Counter[str] = Counter()
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=60) as answer:
            for family in text_string_to_metric_families(answer.read().decode()):
                for sample in family.samples:
                    protocol = sample.labels.get("protocol", "")
                    sums[f"{sample.name} {protocol}".strip()] += sample.value  # type: ignore[assignment]
        return sums


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    models, case = tmp_path_factory.mktemp("models"), MODELS["dlrm"]()
    deploy(case.model, models, name=MODEL, version=1, examples=case.examples(4))
    config = ServerConfig(
        models_folder=models, http_address="127.0.0.1:0", grpc_address="127.0.0.1:0"
    )
    with Server(config) as server:
        server.start()
        assert server.grpc is not None
        with grpc.insecure_channel(server.grpc.address) as channel:
            yield Fuzzed(server, channel, case.request(case.examples(3)))


def datatype(array: np.ndarray) -> str:
    return {"float32": "FP32", "int64": "INT64"}[array.dtype.name]


def as_json(arrays: dict[str, np.ndarray], *, binary: bool = False) -> dict[str, Any]:
    inputs = []
    for name, array in arrays.items():
        tensor: dict[str, Any] = {
            "name": name,
            "datatype": datatype(array),
            "shape": list(array.shape),
        }
        if binary:
            tensor["parameters"] = {"binary_data_size": array.nbytes}
        else:
            tensor["data"] = array.tolist()
        inputs.append(tensor)
    return {
        "id": "1",
        "parameters": {"binary_data_output": False},
        "inputs": inputs,
        "outputs": [{"name": "output"}],
    }


def change(tree: Any, value: Any, draw: random.Random) -> Any:
    """Put ``value`` at some place of a tree of JSON, beside it, or leave out what is there."""
    tree, at = copy.deepcopy(tree), None
    node, parent = tree, None
    while isinstance(node, dict | list) and node and (parent is None or draw.random() < 0.8):
        parent = node
        at = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = node[at]
    if parent is None:
        return value
    match draw.randrange(4):
        case 0:
            del parent[at]
        case 1 if isinstance(parent, list):
            parent.insert(at, value)
        case 1 if isinstance(value, str):
            parent[value] = parent.pop(at)
        case 2 if type(node) is int:
            parent[at] = node + draw.choice((-1, 1, 2**40))
        case _:
            parent[at] = value
    return tree


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, left out, or added."""
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(4):
            case 0:
                data = data[:at]
            case 1:
                data = data[:at] + draw.randbytes(draw.randrange(1, 9)) + data[at:]
            case 2:
                data = data[:at] + data[at + draw.randrange(1, 9) :]
            case _ if at < len(data):
                data = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    return data


class Asking:
    """A connection over HTTP that counts answers by status."""

    def __init__(self, fuzzed: Fuzzed) -> None:
        self._connection = http.client.HTTPConnection(fuzzed.http, timeout=120)
        self._right = json.dumps(as_json(fuzzed.arrays)).encode()
        self.statuses: Counter[int] = Counter()

    def ask(self, body: bytes, headers: dict[str, Any] | None = None, path: str = PATH) -> int:
        self._connection.request("POST", path, body, headers or {})
        response = self._connection.getresponse()
        answer = response.read()
        self.statuses[response.status] += 1
        if response.status == 200:
            assert response.getheader("content-type") in (
                "application/json",
                "application/octet-stream",
            )
            return 200
        assert 400 <= response.status < 500, (response.status, answer)
        assert response.getheader("content-type") == "application/json"
        error = json.loads(answer)
        assert list(error) == ["error"] and error["error"] and isinstance(error["error"], str)
        return response.status

    def ask_rightly(self) -> None:
        """Ask what is answered, over the same connection where the server left it open."""
        assert self.ask(self._right) == 200

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def counted(fuzzed: Fuzzed) -> Iterator[Asking]:
    """A connection whose answers are those that the server counts."""
    before, asking = fuzzed.totals(), Asking(fuzzed)
    yield asking
    asking.ask_rightly()
    asking.close()
    after = fuzzed.totals()
    assert (
        after["nv_inference_request_success"] - before["nv_inference_request_success"]
        == (asking.statuses[200])
    )
    refused = "torchembed_refused_requests_total http"
    assert after[refused] - before[refused] == asking.statuses.total() - asking.statuses[200]
    assert after["torchembed_requests_in_progress http"] == 1  # for these metrics
    assert after["torchembed_lookup_keys_total"] == (
        after["torchembed_cache_hits_total"] + after["torchembed_cache_misses_total"]
    )


def test_json_that_went_wrong_is_refused(fuzzed: Fuzzed, counted: Asking) -> None:
    right = as_json(fuzzed.arrays)

    @fuzzing
    @given(st.lists(strange, min_size=1, max_size=3), st.integers(0, 2**32), st.integers(0, 3))
    def ask(values: list[Any], seed: int, num_damages: int) -> None:
        draw, request = random.Random(seed), right
        for value in values:
            request = change(request, value, draw)
        body = json.dumps(request).encode()
        if num_damages == 0:
            body = damaged(body, draw)
        counted.ask(body)
        if draw.random() < 0.2:
            counted.ask_rightly()

    ask()
    assert len(counted.statuses) > 1


def test_tensors_as_bytes_that_went_wrong_are_refused(fuzzed: Fuzzed, counted: Asking) -> None:
    right = as_json(fuzzed.arrays, binary=True)
    data = b"".join(array.tobytes() for array in fuzzed.arrays.values())
    lengths = st.sampled_from(["", "-1", "0", "1", "x", "1e3", "9" * 17, "9" * 30, "+5", "0x10"])

    @fuzzing
    @given(strange, st.integers(0, 2**32), lengths)
    def ask(value: Any, seed: int, length: str) -> None:
        draw = random.Random(seed)
        kind, tensors, request = draw.randrange(4), data, right
        if kind == 0:
            request = change(right, value, draw)
        text = json.dumps(request).encode()
        said = str(len(text))
        if kind == 1:
            tensors = damaged(data, draw)
        elif kind == 2:
            said = length
        elif kind == 3:
            said = str(len(text) + draw.choice((-5, -1, 1, 5, len(data), 10**9)))
        counted.ask(text + tensors, {"Inference-Header-Content-Length": said})
        if draw.random() < 0.2:
            counted.ask_rightly()

    ask()
    assert len(counted.statuses) > 1


def test_paths_and_fields_that_went_wrong_are_refused(fuzzed: Fuzzed, counted: Asking) -> None:
    plain = st.sampled_from(("versions", "1", "2", "-1", "9" * 500, "infer", "x", "config"))
    segments = plain | st.sampled_from(
        ("", "%00", "..", "%2e%2e", "%ff", "%", "..%2f", "%2F", "?", "#", "a%20b", ";")
    )
    prefixes = st.sampled_from(("", "/v2", "/v2/models", f"/v2/models/{MODEL}"))

    @fuzzing
    @given(prefixes, st.lists(segments, max_size=4), st.sampled_from(("x", "content-encoding")))
    def ask(prefix: str, parts: list[str], field: str) -> None:
        path = f"{prefix}/" + "/".join(parts)
        counted.ask(b"{}", {field: "br" if field == "content-encoding" else "\xff\x80"}, path)

    ask()
    del counted.statuses[405]  # which is no fault that is counted


def test_bytes_that_are_no_http_are_refused_or_end_the_connection(fuzzed: Fuzzed) -> None:
    body = json.dumps(as_json(fuzzed.arrays)).encode()
    right = (
        f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    ).encode()
    asking = Asking(fuzzed)
    host, _, port = fuzzed.http.rpartition(":")

    @fuzzing
    @given(st.binary(max_size=200), st.integers(0, 2**32))
    def send(noise: bytes, seed: int) -> None:
        draw = random.Random(seed)
        sent = noise + b"\r\n\r\n" if draw.random() < 0.3 else damaged(right, draw) + body
        with socket.create_connection((host, int(port)), timeout=120) as client:
            received = b""
            with contextlib.suppress(ConnectionError):
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
                while some := client.recv(1 << 16):
                    received += some
        statuses = [
            int(line.split()[1]) for line in received.split(b"\r\n") if line[:9] == b"HTTP/1.1 "
        ]
        # What is no request at all, or ends within one, has no answer.
        assert all(status in (100, 200) or 400 <= status < 500 for status in statuses), received
        if draw.random() < 0.2:
            asking.ask_rightly()

    send()
    asking.ask_rightly()
    asking.close()
    # Those of connections that ended meanwhile are computed to their end.
    wait_until(lambda: fuzzed.totals()["torchembed_requests_in_progress http"] == 1)


def right_message(arrays: dict[str, np.ndarray]) -> Any:
    request = ModelInferRequest(model_name=MODEL, id="1")
    for name, array in arrays.items():
        request.inputs.add(name=name, datatype=datatype(array), shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


def test_messages_that_went_wrong_are_refused(fuzzed: Fuzzed) -> None:
    right = right_message(fuzzed.arrays)
    infer = fuzzed.channel.unary_unary(f"{SERVICE}ModelInfer")
    codes: Counter[grpc.StatusCode] = Counter()
    before = fuzzed.totals()

    def ask(data: bytes) -> grpc.StatusCode:
        try:
            infer(data, timeout=120)
        except grpc.RpcError as error:
            code, text = error.code(), error.details()  # type: ignore[attr-defined]
            assert code in REFUSALS and text, (code, text)
        else:
            code = CODES.OK
        codes[code] += 1
        return code

    def change_message(request: Any, value: Any, draw: random.Random) -> None:
        tensor = draw.choice(request.inputs)
        text = value if isinstance(value, str) and "\ud800" not in value else "x"
        number = value if type(value) is int and abs(value) < 2**63 else -1
        at = draw.randrange(len(request.raw_input_contents))
        match draw.randrange(9):
            case 0:
                tensor.name = text
            case 1:
                tensor.datatype = text
            case 2:
                tensor.shape[draw.randrange(2)] = number
            case 3:
                del tensor.shape[0]
            case 4:
                tensor.contents.int64_contents.append(number)
            case 5:
                del request.raw_input_contents[at]
            case 6:
                request.raw_input_contents[at] = damaged(request.raw_input_contents[at], draw)
            case 7:
                request.outputs.add(name=text)
            case 8:
                request.model_name, request.model_version = draw.choice(
                    [(text, ""), (MODEL, text), (MODEL, "2")]
                )

    @fuzzing
    @given(strange, st.integers(0, 2**32))
    def send(value: Any, seed: int) -> None:
        draw, request = random.Random(seed), ModelInferRequest()
        request.CopyFrom(right)
        change_message(request, value, draw)
        data = request.SerializeToString()
        ask(damaged(data, draw) if draw.random() < 0.4 else data)
        if draw.random() < 0.2:
            assert ask(right.SerializeToString()) is CODES.OK

    send()
    assert ask(right.SerializeToString()) is CODES.OK
    after = fuzzed.totals()
    success, refused = "nv_inference_request_success", "torchembed_refused_requests_total grpc"
    assert after[success] - before[success] == codes[CODES.OK] > 1
    assert after[refused] - before[refused] == codes.total() - codes[CODES.OK] > 1


def test_random_bytes_to_each_call_are_refused(fuzzed: Fuzzed) -> None:
    of_models = ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "ModelInfer")
    of_folders = ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload")
    names = st.sampled_from(("ServerLive", *of_models, *of_folders, "Other"))

    codes: set[grpc.StatusCode] = set()

    @fuzzing
    @given(names, st.binary(max_size=50))
    def send(name: str, data: bytes) -> None:
        try:
            fuzzed.channel.unary_unary(f"{SERVICE}{name}")(data, timeout=120)
        except grpc.RpcError as error:
            codes.add(error.code())  # type: ignore[attr-defined]

    send()
    assert codes and codes <= REFUSALS
    infer = fuzzed.channel.unary_unary(f"{SERVICE}ModelInfer")
    assert infer(right_message(fuzzed.arrays).SerializeToString(), timeout=120)
