"""Answers of the Open Inference Protocol over HTTP."""

import json
from typing import Any, NamedTuple

from torchembed.serving.datatypes import datatype_of
from torchembed.serving.interface import Answer
from torchembed.serving.protocols import tensors
from torchembed.serving.protocols.http_requests import HttpInference


class HttpAnswer(NamedTuple):
    """A body, and how long its JSON part is where tensors as bytes follow it."""

    body: bytes
    json_length: int | None


def written_answer(model: str, request: HttpInference, answer: Answer) -> HttpAnswer:
    """The body that answers ``request``.

    Raises:
        InvalidRequestError: where JSON is asked for and cannot hold an output.
    """
    outputs: list[dict[str, Any]] = []
    buffers: list[bytes] = []
    for name in request.outputs or answer.outputs:
        array = answer.outputs[name]
        output: dict[str, Any] = {
            "name": name,
            "datatype": datatype_of(array.dtype),
            "shape": array.shape,
        }
        if request.binary_outputs.get(name, request.binary_by_default):
            buffers.append(tensors.to_bytes(array))
            output["parameters"] = {"binary_data_size": len(buffers[-1])}
        else:
            output["data"] = tensors.to_json(name, array)
        outputs.append(output)
    header: dict[str, Any] = {"model_name": model, "model_version": answer.version}
    if request.request_id is not None:
        header["id"] = request.request_id
    header["parameters"] = {"default_rows": int(answer.num_default_rows)}
    header["outputs"] = outputs
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    if not buffers:
        return HttpAnswer(text, None)
    return HttpAnswer(b"".join([text, *buffers]), len(text))
