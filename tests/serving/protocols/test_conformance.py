"""Both servers, asked by ``tritonclient`` what any server of the protocol is asked."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2

from tests.support.inference_cases import CASES, Client, Subject, case_name
from tests.support.served_models import (
    ECHO_DTYPES,
    EchoModel,
    MemoryDirectory,
    ScoringModel,
    scoring_inputs,
)
from torchembed.serving.protocols import GrpcServer, HttpServer


@pytest.fixture(scope="module")
def directory() -> MemoryDirectory:
    return MemoryDirectory().with_loaded(EchoModel(), ScoringModel(version="3"))


@pytest.fixture(scope="module", params=("http", "grpc"))
def client(request: pytest.FixtureRequest, directory: MemoryDirectory) -> Iterator[Client]:
    is_http = request.param == "http"
    server = HttpServer(directory) if is_http else GrpcServer(directory)
    server.start()
    module = tritonclient.http if is_http else tritonclient.grpc
    connection = module.InferenceServerClient(server.address)
    yield Client(module, connection)
    connection.close()
    server.stop(5)


@pytest.fixture(scope="module")
def scores() -> Subject:
    model = ScoringModel()
    inputs = scoring_inputs(32)
    return Subject(
        model="scores",
        version="3",
        inputs=inputs,
        outputs=model.answer(inputs).outputs,
        shapes={tensor.name: list(tensor.shape) for tensor in model.form.inputs},
    )


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conforms(case: Callable[[Client, Subject], None], client: Client, scores: Subject) -> None:
    case(client, scores)


@pytest.mark.parametrize("form", ["binary", "json"])
@pytest.mark.parametrize("name", list(ECHO_DTYPES))
def test_every_datatype_comes_back(client: Client, name: str, form: str) -> None:
    if not client.is_http and form == "json":
        pytest.skip("gRPC has no JSON")
    if name == "fp16" and form == "json":
        pytest.skip("tritonclient sends FP16 in binary form alone")
    dtype = np.dtype(ECHO_DTYPES[name])
    if dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        array = np.array([[low, high], [0, 1], [high, 5]], dtype)
    elif dtype.kind == "f":
        array = np.array([[np.finfo(dtype).max, -0.0], [0.1, np.finfo(dtype).tiny]], dtype)
    elif dtype.kind == "b":
        array = np.array([[True, False], [False, True]])
    else:
        array = np.array([[b"", "ä€".encode()], [b"a" * 300, b"\x00"]], object)
    inputs = client.tensors({name: array}, binary_data=form == "binary")
    outputs = [client.wanted(f"{name}.out", binary_data=form == "binary")]
    result = client.connection.infer("echo", inputs, outputs=outputs)
    got = result.as_numpy(f"{name}.out")
    if dtype.hasobject and form == "json":
        got = np.array([[text.encode() for text in row] for row in got.tolist()], object)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_numbers_that_are_not_finite_come_back_in_binary_form(client: Client, dtype: type) -> None:
    name = {2: "fp16", 4: "fp32", 8: "fp64"}[np.dtype(dtype).itemsize]
    array = np.array([[np.nan, np.inf], [-np.inf, 0]], dtype)
    result = client.connection.infer("echo", client.tensors({name: array}))
    np.testing.assert_array_equal(result.as_numpy(f"{name}.out"), array)


def test_answers_say_how_many_rows_were_defaults(client: Client, scores: Subject) -> None:
    response = client.infer(scores).get_response()
    missing = sum(
        int(((array < 0) | (array >= 1000)).sum())
        for name, array in scores.inputs.items()
        if name.startswith("id_")
    )
    assert missing > 0
    if client.is_http:
        assert response["parameters"] == {"default_rows": missing}
    else:
        assert response.parameters["default_rows"].int64_param == missing


def test_models_come_and_go(client: Client, directory: MemoryDirectory) -> None:
    connection = client.connection
    directory.folder["late"] = [EchoModel("late", "1")]
    assert not connection.is_model_ready("late")
    connection.load_model("late")
    assert connection.is_model_ready("late")
    directory.folder["late"].append(EchoModel("late", "2"))
    connection.load_model("late")
    described = client.described("get_model_metadata", "late")
    assert described["versions"] == ["1", "2"]
    assert client.described("get_model_metadata", "late", "1")["versions"] == ["1"]
    connection.unload_model("late")
    assert not connection.is_model_ready("late")
    described = client.described("get_model_repository_index")
    entries = described if client.is_http else described["models"]
    entry = next(entry for entry in entries if entry["name"] == "late")
    assert entry["state"] == "UNAVAILABLE"
    assert entry["reason"] == "unloaded"


def test_a_version_is_loaded_by_name(client: Client, directory: MemoryDirectory) -> None:
    connection = client.connection
    directory.folder["named"] = [EchoModel("named", "1"), EchoModel("named", "2")]
    connection.load_model("named")
    assert _answering(client, "named") == "2"
    policy = {"version_policy": {"specific": {"versions": [1]}}}
    connection.load_model("named", config=json.dumps(policy))
    assert _answering(client, "named") == "1"
    policy["version_policy"]["specific"]["versions"] = [7]
    with pytest.raises(Exception, match="model 'named' has no version '7'"):
        connection.load_model("named", config=json.dumps(policy))
    assert _answering(client, "named") == "1"


def test_a_model_is_rolled_back(client: Client, directory: MemoryDirectory) -> None:
    directory.folder["back"] = [EchoModel("back", "1")]
    directory.loaded.pop("back", None)
    client.connection.load_model("back")
    directory.folder["back"].append(EchoModel("back", "2"))
    assert _load(client, "back", {"roll_back": False}) == (True, "")
    assert _answering(client, "back") == "2"
    assert _load(client, "back", {"roll_back": True}) == (True, "")
    assert _answering(client, "back") == "1"
    is_done, error = _load(client, "back", {"roll_back": True})
    assert not is_done
    assert "'back' cannot be rolled back: model 'back' has answered by nothing before" in error


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"roll_back": "yes"}, "roll_back must be true or false, got 'yes'"),
        ({"roll_back": True, "config": "{}"}, "must have one of roll_back and config, got both"),
        ({"version": 1}, "load takes roll_back and config alone, got version; for all else change"),
        ({"config": 1}, "config must be a string that holds a JSON object, got 1"),
        ({"config": "[1]"}, r"config must be a string that holds a JSON object, got '\[1\]'"),
        ({"config": "{"}, "config must be a string that holds a JSON object, got '{'"),
        ({"config": "[" * 100_000}, r"holds a JSON object, got '\[{196}\.\.\."),
        (
            {"config": '{"max_batch_size": 8, "backend": "x"}'},
            "config of load takes version_policy alone, got backend, max_batch_size; for all else",
        ),
        (
            {"config": '{"version_policy": {"latest": {"num_versions": 2}}}'},
            'must name one version: {"version_policy": .* for the newest leave config out',
        ),
        (
            {"config": '{"version_policy": {"specific": {"versions": [1, 2]}}}'},
            "config must name one version",
        ),
        (
            {"config": '{"version_policy": {"specific": {"versions": [true]}}}'},
            "config must name one version",
        ),
    ],
)
def test_parameters_of_a_load_that_cannot_be(
    client: Client, parameters: dict[str, Any], error: str
) -> None:
    is_done, found = _load(client, "echo", parameters)
    assert not is_done
    assert re.search(error, found), found


def _answering(client: Client, model: str) -> str:
    array = np.zeros((1, 2), np.float32)
    response = client.connection.infer(model, client.tensors({"fp32": array})).get_response()
    return response["model_version"] if client.is_http else response.model_version


def _load(client: Client, model: str, parameters: dict[str, Any]) -> tuple[bool, str]:
    """Load with parameters, which tritonclient's own call does not send; returns whether that was
    done, and the error."""
    if client.is_http:
        reply = client.connection._post(
            f"v2/repository/models/{model}/load", json.dumps({"parameters": parameters}), None, None
        )
        body = reply.read()
        return reply.status_code == 200, json.loads(body)["error"] if body else ""
    messages: Any = service_pb2  # made as it is imported
    request = messages.RepositoryModelLoadRequest(model_name=model)
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param"}
    for name, value in parameters.items():
        setattr(request.parameters[name], kinds[type(value)], value)
    try:
        client.connection._client_stub.RepositoryModelLoad(request)
    except grpc.RpcError as error:
        return False, str(error.details())
    return True, ""
