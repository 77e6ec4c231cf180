"""The Open Inference Protocol over HTTP, byte by byte."""

import http.client
import json
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.served_models import EchoModel, MemoryDirectory, ScoringModel
from torchembed.serving.protocols import HttpServer


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    server = HttpServer(MemoryDirectory().with_loaded(EchoModel(), ScoringModel()))
    server.start()
    yield server
    server.stop(5)


def asked(
    server: HttpServer, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(server.address, timeout=60)
    payload = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, payload, named)
    response = connection.getresponse()
    result = (response.status, dict(response.getheaders()), response.read())
    connection.close()
    return result


def test_tensors_in_json_come_back_in_json(server: HttpServer) -> None:
    request = {
        "id": "seven",
        "inputs": [
            {"name": "int64", "datatype": "INT64", "shape": [2, 2], "data": [[1, 2], [3, 2**62]]},
            {"name": "bytes", "datatype": "BYTES", "shape": [1, 2], "data": ["a", "ä"]},
        ],
    }
    status, headers, body = asked(server, "POST", "/v2/models/echo/infer", request)
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert json.loads(body) == {
        "model_name": "echo",
        "model_version": "1",
        "id": "seven",
        "parameters": {"default_rows": 0},
        "outputs": [
            {"name": "int64.out", "datatype": "INT64", "shape": [2, 2], "data": [1, 2, 3, 2**62]},
            {"name": "bytes.out", "datatype": "BYTES", "shape": [1, 2], "data": ["a", "ä"]},
        ],
    }


def test_tensors_as_bytes_follow_the_json_part(server: HttpServer) -> None:
    values = np.array([[0.5, -2.0]], np.float16)
    request = {
        "parameters": {"binary_data_output": True},
        "inputs": [
            {
                "name": "fp16",
                "datatype": "FP16",
                "shape": [1, 2],
                "parameters": {"binary_data_size": 4},
            }
        ],
    }
    header = json.dumps(request).encode()
    status, headers, body = asked(
        server,
        "POST",
        "/v2/models/echo/infer",
        header + values.tobytes(),
        Inference_Header_Content_Length=str(len(header)),
    )
    assert status == 200
    length = int(headers["inference-header-content-length"])
    output = {
        "name": "fp16.out",
        "datatype": "FP16",
        "shape": [1, 2],
        "parameters": {"binary_data_size": 4},
    }
    assert json.loads(body[:length])["outputs"] == [output]
    assert body[length:] == values.tobytes()


@pytest.mark.parametrize("parameters", [[], 0, False, ""])
def test_parameters_of_a_load_are_an_object(server: HttpServer, parameters: object) -> None:
    path = "/v2/repository/models/echo/load"
    status, _, body = asked(server, "POST", path, {"parameters": parameters})
    assert (status, json.loads(body)) == (400, {"error": "parameters must be an object"})
    assert asked(server, "POST", path, {"parameters": None})[0] == 200


def test_metrics_are_given_whatever_version_is_accepted(server: HttpServer) -> None:
    accept = "application/openmetrics-text; version=first"
    status, headers, _ = asked(server, "GET", "/metrics", Accept=accept)
    assert status == 200 and headers["content-type"].startswith("text/plain")
