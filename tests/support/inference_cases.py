"""What servers of the Open Inference Protocol must do, as ``tritonclient`` sees it.

Each case runs against any server by HTTP and by gRPC alike: ours, and NVIDIA's.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException, np_to_triton_dtype


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that a server has, a request to it, and the answer."""

    model: str
    version: str
    inputs: Mapping[str, np.ndarray]
    """All inputs of the model; of at least one float32 each element must fit JSON."""
    outputs: Mapping[str, np.ndarray]
    """All outputs for these inputs."""
    shapes: Mapping[str, list[int]] = field(default_factory=dict)
    """Of inputs and outputs in the metadata, by name; those that are not here are not looked at."""
    rtol: float = 0.0


class Client(NamedTuple):
    """A connection, and the half of ``tritonclient`` that it is of."""

    module: ModuleType
    """``tritonclient.http`` or ``tritonclient.grpc``."""
    connection: Any

    @property
    def is_http(self) -> bool:
        return self.module.__name__.endswith("http")

    def tensors(self, arrays: Mapping[str, np.ndarray], **form: bool) -> list[Any]:
        """The inputs of a request; ``binary_data`` as of ``tritonclient.http``."""
        tensors = []
        for name, array in arrays.items():
            tensor = self.module.InferInput(
                name, list(array.shape), np_to_triton_dtype(array.dtype)
            )
            tensor.set_data_from_numpy(array, **(form if self.is_http else {}))
            tensors.append(tensor)
        return tensors

    def wanted(self, name: str, **form: bool) -> Any:
        """An output that is asked for."""
        return self.module.InferRequestedOutput(name, **(form if self.is_http else {}))

    def infer(self, subject: Subject, inputs: Any = None, **more: Any) -> Any:
        """The model's answer, to the subject's inputs unless there are others."""
        given = self.tensors(subject.inputs) if inputs is None else inputs
        return self.connection.infer(subject.model, given, **more)

    def described(self, call: str, *args: Any) -> Any:
        """What a call of the connection describes, as a dict."""
        if self.is_http:
            return getattr(self.connection, call)(*args)
        return getattr(self.connection, call)(*args, as_json=True)


def same(result: Any, subject: Subject, names: set[str] | None = None) -> None:
    """Require of a result the subject's outputs of these names, all for None, and no others."""
    expected = {n: a for n, a in subject.outputs.items() if names is None or n in names}
    response = result.get_response()
    listed = response["outputs"] if isinstance(response, dict) else response.outputs
    listed_names = [o["name"] if isinstance(o, dict) else o.name for o in listed]
    assert sorted(listed_names) == sorted(expected)
    for name, array in expected.items():
        got = result.as_numpy(name)
        assert got.dtype == array.dtype
        assert got.shape == array.shape
        if array.dtype.kind == "f" and subject.rtol:
            np.testing.assert_allclose(got, array, rtol=subject.rtol)
        else:
            np.testing.assert_array_equal(got, array)


def refused(status: str, http: int) -> Any:
    """Expects the client to show an error of this status of gRPC, or this one of HTTP."""
    return pytest.raises(InferenceServerException, match=rf"^\[(StatusCode\.{status}|{http})\] .+")


def answers_in_binary_form(client: Client, subject: Subject) -> None:
    same(client.infer(subject), subject)


def answers_in_json(client: Client, subject: Subject) -> None:
    result = client.infer(
        subject,
        client.tensors(subject.inputs, binary_data=False),
        outputs=[client.wanted(name, binary_data=False) for name in subject.outputs],
    )
    same(result, subject)


def answers_json_by_binary_form(client: Client, subject: Subject) -> None:
    result = client.infer(subject, client.tensors(subject.inputs, binary_data=False))
    same(result, subject)


def answers_one_in_json_and_one_in_binary_form(client: Client, subject: Subject) -> None:
    outputs = [
        client.wanted(name, binary_data=position % 2 == 0)
        for position, name in enumerate(subject.outputs)
    ]
    same(client.infer(subject, outputs=outputs), subject)


def gives_only_what_is_asked_for(client: Client, subject: Subject) -> None:
    name = next(iter(subject.outputs))
    same(client.infer(subject, outputs=[client.wanted(name)]), subject, {name})


def takes_inputs_in_any_order(client: Client, subject: Subject) -> None:
    turned = dict(reversed(subject.inputs.items()))
    same(client.infer(subject, client.tensors(turned)), subject)


def gives_the_id_back(client: Client, subject: Subject) -> None:
    response = client.infer(subject, request_id="a b/ä").get_response()
    assert (response["id"] if client.is_http else response.id) == "a b/ä"


def names_model_and_version(client: Client, subject: Subject) -> None:
    response = client.infer(subject, model_version=subject.version).get_response()
    if client.is_http:
        assert response["model_name"] == subject.model
        assert response["model_version"] == subject.version
    else:
        assert response.model_name == subject.model
        assert response.model_version == subject.version


def answers_an_empty_batch_or_refuses_it(client: Client, subject: Subject) -> None:
    empty = {name: array[:0] for name, array in subject.inputs.items()}
    result, status = None, None
    try:
        result = client.infer(subject, client.tensors(empty))
    except InferenceServerException as error:
        status = error.status()
    if result is None:
        assert status in ("400", "StatusCode.INVALID_ARGUMENT")
        return
    for name, array in subject.outputs.items():
        assert result.as_numpy(name).shape == (0, *array.shape[1:])


def refuses_an_unknown_model(client: Client, subject: Subject) -> None:
    with refused("NOT_FOUND", 404):
        client.connection.infer("no-such-model", client.tensors(subject.inputs))


def refuses_an_unknown_version(client: Client, subject: Subject) -> None:
    with refused("(NOT_FOUND|UNAVAILABLE)", 404):
        client.infer(subject, model_version="987654")


def refuses_an_unknown_input(client: Client, subject: Subject) -> None:
    with refused("INVALID_ARGUMENT", 400):
        client.infer(
            subject, client.tensors({**subject.inputs, "other": np.zeros((1, 1), np.float32)})
        )


def refuses_a_missing_input(client: Client, subject: Subject) -> None:
    with refused("INVALID_ARGUMENT", 400):
        client.infer(subject, client.tensors(dict(list(subject.inputs.items())[1:])))


def refuses_an_input_that_comes_twice(client: Client, subject: Subject) -> None:
    tensors = client.tensors(subject.inputs)
    with refused("INVALID_ARGUMENT", 400):
        client.infer(subject, [*tensors, tensors[0]])


def refuses_no_inputs(client: Client, subject: Subject) -> None:
    with refused("INVALID_ARGUMENT", 400):
        client.infer(subject, [])


def refuses_another_datatype(client: Client, subject: Subject) -> None:
    name, array = next(iter(subject.inputs.items()))
    other = np.float64 if array.dtype != np.float64 else np.int16
    with refused("INVALID_ARGUMENT", 400):
        client.infer(subject, client.tensors({**subject.inputs, name: array.astype(other)}))


def refuses_another_rank(client: Client, subject: Subject) -> None:
    name, array = next(iter(subject.inputs.items()))
    with refused("INVALID_ARGUMENT", 400):
        client.infer(subject, client.tensors({**subject.inputs, name: array[..., None]}))


def refuses_an_unknown_output(client: Client, subject: Subject) -> None:
    with refused("INVALID_ARGUMENT", 400):
        client.infer(subject, outputs=[client.wanted("no-such-output")])


def is_live_and_ready(client: Client, subject: Subject) -> None:
    connection = client.connection
    assert connection.is_server_live()
    assert connection.is_server_ready()
    assert connection.is_model_ready(subject.model)
    assert connection.is_model_ready(subject.model, subject.version)
    assert not connection.is_model_ready("no-such-model")


def describes_the_server(client: Client, subject: Subject) -> None:
    described = client.described("get_server_metadata")
    assert described["name"]
    assert described["version"]
    extensions = {"binary_tensor_data", "model_configuration", "model_repository", "statistics"}
    assert extensions <= set(described["extensions"])


def describes_the_model(client: Client, subject: Subject) -> None:
    described = client.described("get_model_metadata", subject.model)
    assert described["name"] == subject.model
    assert subject.version in described["versions"]
    for kind, arrays in (("inputs", subject.inputs), ("outputs", subject.outputs)):
        datatypes = {tensor["name"]: tensor["datatype"] for tensor in described[kind]}
        for name, array in arrays.items():
            assert datatypes[name] == np_to_triton_dtype(array.dtype)
        shapes = {tensor["name"]: [int(n) for n in tensor["shape"]] for tensor in described[kind]}
        for name in set(arrays) & set(subject.shapes):
            assert shapes[name] == subject.shapes[name]


def refuses_to_describe_an_unknown_model(client: Client, subject: Subject) -> None:
    for call in ("get_model_metadata", "get_model_config", "get_inference_statistics"):
        with pytest.raises(InferenceServerException, match=r"^\[(StatusCode\.NOT_FOUND|40[04])\]"):
            client.described(call, "no-such-model")


def shows_the_configuration(client: Client, subject: Subject) -> None:
    described = client.described("get_model_config", subject.model)
    config = described if client.is_http else described["config"]
    assert config["name"] == subject.model
    for kind, arrays in (("input", subject.inputs), ("output", subject.outputs)):
        datatypes = {tensor["name"]: tensor["data_type"] for tensor in config[kind]}
        for name, array in arrays.items():
            wanted = np_to_triton_dtype(array.dtype).replace("BYTES", "STRING")
            assert datatypes[name] == f"TYPE_{wanted}"


def has_the_model_in_its_index(client: Client, subject: Subject) -> None:
    described = client.described("get_model_repository_index")
    entries = described if client.is_http else described["models"]
    entry = next(entry for entry in entries if entry["name"] == subject.model)
    assert (entry["version"], entry["state"]) == (subject.version, "READY")


def counts_what_it_answered(client: Client, subject: Subject) -> None:
    def numbers() -> tuple[int, int, int]:
        described = client.described("get_inference_statistics", subject.model, subject.version)
        (stats,) = described["model_stats"]
        success = stats["inference_stats"]["success"]
        return (
            int(stats.get("inference_count", 0)),
            int(success.get("count", 0)),
            int(success.get("ns", 0)),
        )

    def settled_numbers() -> tuple[int, int, int]:
        """The numbers once half a second does not change them: a server may count a request after
        it has sent the answer."""
        last, now = None, numbers()
        while now != last:
            time.sleep(0.5)
            last, now = now, numbers()
        return now

    client.infer(subject)
    before = settled_numbers()
    client.infer(subject)
    after = settled_numbers()
    assert after[0] > before[0]
    assert after[1] == before[1] + 1
    assert after[2] > before[2]


def refuses_to_load_an_unknown_model(client: Client, subject: Subject) -> None:
    with pytest.raises(InferenceServerException, match=r"^\[(StatusCode\.\w+|4\d\d)\] .+"):
        client.connection.load_model("no-such-model")


def loads_a_model_again(client: Client, subject: Subject) -> None:
    client.connection.load_model(subject.model)
    assert client.connection.is_model_ready(subject.model)
    same(client.infer(subject), subject)


CASES: tuple[Callable[[Client, Subject], None], ...] = (
    answers_in_binary_form,
    answers_in_json,
    answers_json_by_binary_form,
    answers_one_in_json_and_one_in_binary_form,
    gives_only_what_is_asked_for,
    takes_inputs_in_any_order,
    gives_the_id_back,
    names_model_and_version,
    answers_an_empty_batch_or_refuses_it,
    refuses_an_unknown_model,
    refuses_an_unknown_version,
    refuses_an_unknown_input,
    refuses_a_missing_input,
    refuses_an_input_that_comes_twice,
    refuses_no_inputs,
    refuses_another_datatype,
    refuses_another_rank,
    refuses_an_unknown_output,
    is_live_and_ready,
    describes_the_server,
    describes_the_model,
    refuses_to_describe_an_unknown_model,
    shows_the_configuration,
    has_the_model_in_its_index,
    counts_what_it_answered,
    refuses_to_load_an_unknown_model,
    loads_a_model_again,
)
"""All cases, by functions whose names say what is required; for ``pytest.mark.parametrize``."""


def case_name(case: Callable[[Client, Subject], None]) -> str:
    """The name of a case, as the id of a test."""
    return case.__name__
