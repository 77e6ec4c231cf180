"""What both protocols count of a known series of requests, as Prometheus reads it."""

import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from prometheus_client.parser import text_string_to_metric_families

from tests.support.inference_cases import Client
from tests.support.served_models import (
    EchoModel,
    FailingModel,
    MemoryDirectory,
    ScoringModel,
    scoring_inputs,
)
from tests.support.waiting import wait_until
from torchembed.serving.interface import Answer
from torchembed.serving.protocols import (
    ExecutionTotals,
    GrpcServer,
    HistogramTotal,
    HttpServer,
    MetricKind,
    MetricTotal,
    RequestLimits,
    ServerMetrics,
    ServerOptions,
)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


IN_PROGRESS = "torchembed_requests_in_progress"


class Both(NamedTuple):
    http: Client
    grpc: Client
    address: str
    metrics: ServerMetrics


@pytest.fixture
def both() -> Iterator[Both]:
    """Two servers that count in one place."""
    directory = MemoryDirectory().with_loaded(
        EchoModel(), ScoringModel(version="7"), FailingModel()
    )
    metrics = ServerMetrics()
    options = ServerOptions(limits=RequestLimits(max_elements=1000))
    servers = [
        kind(directory, options=options, metrics=metrics) for kind in (HttpServer, GrpcServer)
    ]
    clients = []
    for server, module in zip(servers, (tritonclient.http, tritonclient.grpc), strict=True):
        server.start()
        clients.append(Client(module, module.InferenceServerClient(server.address)))
    yield Both(*clients, servers[0].address, metrics)
    for server, client in zip(servers, clients, strict=True):
        client.connection.close()
        server.stop(0)


def read(address: str) -> Samples:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    # A counter whose type stands under another name would be a family of its own, without a type.
    assert len({family.name for family in families}) == len(families)
    assert not [
        family.name
        for family in families
        if family.name.startswith("torchembed_") and family.type == "unknown"
    ]
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in families
        for s in family.samples
    }


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0)


def refusal(client: Client, model: str, arrays: dict[str, np.ndarray]) -> None:
    with pytest.raises(client.module.InferenceServerException):
        client.connection.infer(model, client.tensors(arrays))


def test_a_known_series_of_requests_is_counted_exactly(both: Both) -> None:
    inputs = scoring_inputs(5)
    inputs["id_0"][:] = -1  # without rows
    wide = {"int8": np.zeros((501, 2), np.int8)}
    for client, num_rounds in ((both.http, 3), (both.grpc, 4)):
        for _ in range(num_rounds):
            client.connection.infer("scores", client.tensors(inputs))
            refusal(client, "scores", {**inputs, "unknown": inputs["id_1"]})
            refusal(client, "failing", {})
            refusal(client, "absent", inputs)
            refusal(client, "echo", wide)
            # Neither health nor descriptions are requests of a model.
            assert client.connection.is_server_ready() and client.connection.is_model_ready("echo")
    # A request is out of the count only once its answer is on its way.
    wait_until(lambda: of(read(both.address), IN_PROGRESS, protocol="grpc") == 0)
    found = read(both.address)
    scores, failing, echo = (
        {"model": model, "version": version}
        for model, version in (("scores", "7"), ("failing", "1"), ("echo", "1"))
    )
    assert of(found, "nv_inference_request_success", **scores) == 7
    assert of(found, "nv_inference_request_failure", **scores) == 7
    assert of(found, "nv_inference_count", **scores) == 35
    assert of(found, "nv_inference_exec_count", **scores) == 7
    assert of(found, "nv_inference_pending_request_count", **scores) == 0
    assert of(found, "torchembed_default_rows_total", **scores) == 35
    assert of(found, "torchembed_request_duration_seconds_count", **scores) == 7
    assert of(found, "torchembed_request_duration_seconds_bucket", **scores, le="+Inf") == 7
    for labels in (failing, echo):
        assert of(found, "nv_inference_request_success", **labels) == 0
        assert of(found, "nv_inference_request_failure", **labels) == 7
        assert of(found, "nv_inference_count", **labels) == 0
    assert not any(dict(labels).get("model") == "absent" for _, labels in found)
    for protocol, num_rounds in (("http", 3), ("grpc", 4)):
        refused = {
            dict(labels)["reason"]: value
            for (name, labels), value in found.items()
            if name == "torchembed_refused_requests_total" and ("protocol", protocol) in labels
        }
        assert refused == {
            "InvalidRequest": num_rounds,
            "Failure": num_rounds,
            "UnknownModel": num_rounds,
            "TooLarge": num_rounds,
        }
    assert of(found, IN_PROGRESS, protocol="http") == 1  # for these metrics
    seconds = of(found, "torchembed_request_duration_seconds_sum", **scores)
    parts = [
        of(found, f"nv_inference_{part}_duration_us", **scores)
        for part in ("queue", "compute_input", "compute_infer", "compute_output")
    ]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(seconds * 1e6, rel=1e-9)
    assert of(found, "nv_inference_request_duration_us", **scores) == pytest.approx(sum(parts))


def test_requests_in_progress_are_there_before_the_first_one() -> None:
    lines = ServerMetrics().text()[0].decode().splitlines()
    assert [line for line in lines if line.startswith(IN_PROGRESS)] == [
        'torchembed_requests_in_progress{protocol="http"} 0.0',
        'torchembed_requests_in_progress{protocol="grpc"} 0.0',
    ]


def test_statistics_of_the_protocol_are_those_of_the_metrics(both: Both) -> None:
    inputs = scoring_inputs(5)
    both.http.connection.infer("scores", both.http.tensors(inputs))
    both.grpc.connection.infer("scores", both.grpc.tensors(inputs))
    refusal(both.grpc, "scores", {})
    plain = both.http.connection.get_inference_statistics("scores")["model_stats"]
    told = both.grpc.connection.get_inference_statistics("scores", as_json=True)["model_stats"]
    assert len(plain) == len(told) == 1
    found = read(both.address)
    labels = {"model": "scores", "version": "7"}
    for statistics in (plain[0], told[0]):
        assert int(statistics["inference_count"]) == 10
        assert int(statistics["execution_count"]) == 2
        durations = statistics["inference_stats"]
        assert int(durations["success"]["count"]) == 2
        assert int(durations["fail"]["count"]) == 1
        microseconds = of(found, "nv_inference_request_duration_us", **labels)
        assert int(durations["success"]["ns"]) == pytest.approx(1000 * microseconds, abs=1)


class Updated(ScoringModel):
    """Answers by a dense part of another version, as after an update."""

    def answer(
        self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
    ) -> Answer:
        return super().answer(inputs, outputs)._replace(version="9")


def test_statistics_have_answers_of_updated_dense_parts() -> None:
    directory = MemoryDirectory().with_loaded(Updated(version="7"), EchoModel())
    server = HttpServer(directory)
    server.start()
    client = Client(tritonclient.http, tritonclient.http.InferenceServerClient(server.address))
    client.connection.infer("scores", client.tensors(scoring_inputs(5)))
    for name in ("scores", ""):
        found = client.connection.get_inference_statistics(name)["model_stats"]
        counts = {(s["name"], s["version"]): s["inference_count"] for s in found}
        assert counts.pop(("echo", "1"), 0) == 0
        assert counts == {("scores", "7"): 0, ("scores", "9"): 5}
    client.connection.close()
    server.stop(0)


def test_totals_of_other_parts_are_shown_and_those_that_fail_are_counted(both: Both) -> None:
    def totals() -> Iterator[Any]:
        counter, labels = MetricKind.COUNTER, {"table": 'a"b\\c\n'}
        yield MetricTotal("torchembed_things_total", counter, "Things", labels, 2**53)
        yield HistogramTotal("torchembed_ages", "Ages", {}, (0.5, 2.0), (3, 0, 4), 17.5)

    def failing() -> Iterator[Any]:
        raise RuntimeError("away")

    both.metrics.add_source(totals)
    both.metrics.add_source(failing)
    both.metrics.add_execution_source(lambda: [ExecutionTotals("scores", "7", 1, 9, 0.0)])
    both.http.connection.infer("scores", both.http.tensors(scoring_inputs(5)))
    both.http.connection.infer("scores", both.http.tensors(scoring_inputs(5)))
    found = read(both.address)
    assert of(found, "torchembed_things_total", table='a"b\\c\n') == 2**53
    buckets = [of(found, "torchembed_ages_bucket", le=le) for le in ("0.5", "2.0", "+Inf")]
    assert buckets == [3, 3, 7]
    assert of(found, "torchembed_ages_sum") == 17.5
    assert of(found, "torchembed_failed_metric_reads_total") == 1
    assert of(read(both.address), "torchembed_failed_metric_reads_total") == 2
    labels = {"model": "scores", "version": "7"}
    assert of(found, "nv_inference_exec_count", **labels) == 1  # of two requests together
    assert of(found, "nv_inference_pending_request_count", **labels) == 9
