"""NVIDIA's own server, asked what ours is asked."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http

from tests.support.inference_cases import CASES, Client, Subject, case_name
from tests.support.served_models import ScoringModel, load_scoring, scoring_inputs
from tests.support.triton_server import TritonServer, require_triton
from torchembed.serving.triton import TritonOptions, write_triton_model

# What Triton does otherwise than ours; docs/serving-protocols.md says how.
DIFFERENCES = {
    ("http", "answers_an_empty_batch_or_refuses_it"): "an empty batch is not refused as a 400",
    ("grpc", "answers_an_empty_batch_or_refuses_it"): "nor as an INVALID_ARGUMENT",
    ("http", "refuses_to_load_an_unknown_model"): "loading an unknown model is a 500",
    ("grpc", "refuses_to_describe_an_unknown_model"): "an unknown model is an INVALID_ARGUMENT",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    require_triton()
    folder = tmp_path_factory.mktemp("triton")
    write_triton_model(
        folder / "models",
        ScoringModel(version="3").form,
        f"{load_scoring.__module__}:{load_scoring.__name__}",
        {},
        TritonOptions(
            environment=Path(sys.prefix), python_path=(Path(__file__).parent.parent.parent,)
        ),
    )
    with TritonServer(folder / "models", folder / "log", ["scores"]) as started:
        yield started


@pytest.fixture(scope="module", params=("http", "grpc"))
def client(request: pytest.FixtureRequest, server: TritonServer) -> Iterator[Client]:
    module: Any = {"http": tritonclient.http, "grpc": tritonclient.grpc}[request.param]
    connection = module.InferenceServerClient(getattr(server, request.param))
    yield Client(module, connection)
    connection.close()


@pytest.fixture(scope="module")
def scores() -> Subject:
    model = ScoringModel(version="3")
    inputs = scoring_inputs(32)
    return Subject(
        model="scores",
        version="3",
        inputs=inputs,
        outputs=model.answer(inputs).outputs,
        shapes={tensor.name: list(tensor.shape) for tensor in model.form.inputs},
    )


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conforms(
    case: Callable[[Client, Subject], None],
    client: Client,
    scores: Subject,
    request: pytest.FixtureRequest,
) -> None:
    reason = DIFFERENCES.get(("http" if client.is_http else "grpc", case_name(case)))
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, raises=AssertionError, strict=True))
    case(client, scores)
