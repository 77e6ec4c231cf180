"""Models in NVIDIA's own server, asked by its own clients."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.support.pooled_sums import PooledSums
from tests.support.triton_server import TritonServer, require_triton
from tests.support.waiting import wait_until
from torchembed.serving.triton import TritonOptions, write_triton_model

LOADER = "tests.support.pooled_sums:load"
HERE = TritonOptions(
    environment=Path(sys.prefix), python_path=(Path(__file__).parent.parent.parent,)
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    require_triton()
    folder = tmp_path_factory.mktemp("triton")
    write_triton_model(
        folder / "models",
        PooledSums("fixed", "3", is_jagged=False).form,
        LOADER,
        {"is_jagged": False},
        TritonOptions(
            # The samples of all requests that are to be gathered: then Triton waits no longer.
            max_batch_size=sum(range(1, 9)),
            max_queue_delay_microseconds=10_000_000,
            environment=HERE.environment,
            python_path=HERE.python_path,
        ),
    )
    write_triton_model(
        folder / "models",
        PooledSums("jagged", "1", is_jagged=True).form,
        LOADER,
        {"is_jagged": True},
        HERE,
    )
    with TritonServer(folder / "models", folder / "log", ["fixed", "jagged"]) as started:
        yield started


@pytest.fixture(params=["http", "grpc"])
def ask(
    request: pytest.FixtureRequest, server: TritonServer
) -> Iterator[Callable[..., dict[str, np.ndarray]]]:
    """Asks a model by a client for its outputs."""
    module: Any = getattr(tritonclient, request.param)
    client = module.InferenceServerClient(getattr(server, request.param))

    def infer(
        model: str, inputs: dict[str, np.ndarray], outputs: tuple[str, ...]
    ) -> dict[str, np.ndarray]:
        tensors = input_tensors(module, inputs)
        wanted = [module.InferRequestedOutput(name) for name in outputs]
        result = client.infer(model, tensors, outputs=wanted)
        return {name: result.as_numpy(name) for name in outputs}

    yield infer
    client.close()


def input_tensors(module: Any, inputs: dict[str, np.ndarray]) -> list[Any]:
    """The arrays as tensors of a client's module."""
    tensors = []
    for name, array in inputs.items():
        tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def fixed_inputs(num_samples: int, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        "numbers": generator.integers(-9, 9, (num_samples, 3)).astype(np.float32),
        "ids": generator.integers(-9, 99, (num_samples, 2)),
    }


def jagged_inputs(lengths: list[int]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    return {
        "numbers": generator.integers(-9, 9, (len(lengths), 3)).astype(np.float32),
        "ids": generator.integers(-9, 99, sum(lengths)),
        "ids.lengths": np.array(lengths, dtype=np.int32),
    }


def test_models_answer_as_they_do_in_this_process(ask: Callable[..., dict[str, np.ndarray]]):
    inputs = jagged_inputs([2, 0, 5, 1])
    outputs = ("default_rows", "rows", "sums")
    expected = PooledSums("jagged", "1", is_jagged=True).answer(inputs).outputs
    given = ask("jagged", inputs, outputs)
    for name in outputs:
        assert given[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(given[name], expected[name])


def test_a_batch_without_ids_is_answered(ask: Callable[..., dict[str, np.ndarray]]):
    given = ask("jagged", jagged_inputs([0, 0]), ("sums",))
    np.testing.assert_array_equal(given["sums"], jagged_inputs([0, 0])["numbers"].sum(axis=1))


def test_requests_that_triton_gathers_are_answered_each_by_its_own_rows(
    ask: Callable[..., dict[str, np.ndarray]], server: TritonServer
):
    """Outputs of one number a sample have a dimension of one more there."""
    model = PooledSums("fixed", "3", is_jagged=False)
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    before = executions(client)
    start = threading.Barrier(8)
    answers: dict[int, dict[str, np.ndarray]] = {}

    def one(index: int) -> None:
        own = tritonclient.grpc.InferenceServerClient(server.grpc)
        tensors = input_tensors(tritonclient.grpc, fixed_inputs(index + 1, index))
        start.wait(120)
        result: Any = own.infer("fixed", tensors)
        answers[index] = {name: result.as_numpy(name) for name in ("sums", "rows")}
        own.close()

    threads = [threading.Thread(target=one, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Triton counts a request once its answer is sent.
    wait_until(lambda: executions(client)[0] - before[0] >= 8)
    after = executions(client)
    client.close()
    for index in range(8):
        expected = model.answer(fixed_inputs(index + 1, index)).outputs
        np.testing.assert_array_equal(answers[index]["sums"], expected["sums"][:, None])
        np.testing.assert_array_equal(answers[index]["rows"], expected["rows"])
    assert after[1] - before[1] < 8


def executions(client: tritonclient.grpc.InferenceServerClient) -> tuple[int, int]:
    """Requests that the fixed model answered, and executions that it took."""
    answer: Any = client.get_inference_statistics("fixed")
    (stats,) = answer.model_stats
    return stats.inference_stats.success.count, stats.execution_count


def test_a_request_that_does_not_fit_is_told_why(ask: Callable[..., dict[str, np.ndarray]]):
    inputs = jagged_inputs([1])
    inputs["numbers"][0, 0] = np.nan
    with pytest.raises(InferenceServerException, match="numbers must not be NaN"):
        ask("jagged", inputs, ("sums",))


def test_triton_knows_the_model_as_its_form_says(server: TritonServer):
    client = tritonclient.http.InferenceServerClient(server.http)
    assert client.get_model_metadata("jagged") == {
        "name": "jagged",
        "versions": ["1"],
        "platform": "python",
        "inputs": [
            {"name": "numbers", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "ids", "datatype": "INT64", "shape": [-1]},
            {"name": "ids.lengths", "datatype": "INT32", "shape": [-1]},
        ],
        "outputs": [
            {"name": "sums", "datatype": "FP32", "shape": [-1]},
            {"name": "rows", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "default_rows", "datatype": "INT32", "shape": [-1]},
        ],
    }
    assert client.get_model_metadata("fixed")["versions"] == ["3"]
    client.close()
