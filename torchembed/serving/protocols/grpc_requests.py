"""Inferences of the Open Inference Protocol over gRPC."""

from typing import Any, NamedTuple

import numpy as np

from torchembed.serving.datatypes import datatype_of, dtype_of
from torchembed.serving.interface import Answer, InvalidRequestError
from torchembed.serving.protocols import tensors
from torchembed.serving.protocols.grpc_messages import ModelInferResponse
from torchembed.serving.protocols.options import RequestLimits
from torchembed.serving.protocols.refusals import TooLargeError, UnsupportedError

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_ELSEWHERE = ("shared_memory_region", "classification")


class GrpcInference(NamedTuple):
    """What a message asks of a model."""

    inputs: dict[str, np.ndarray]
    outputs: tuple[str, ...] | None
    """Names of the outputs that are wanted; None for all."""


def read_inference(request: Any, limits: RequestLimits) -> GrpcInference:
    """Read a ``ModelInferRequest``.

    Raises:
        InvalidRequestError: for all that the protocol does not allow.
    """
    for what, values in (("inputs", request.inputs), ("outputs", request.outputs)):
        if len(values) > limits.max_tensors:
            raise TooLargeError(f"{what} must be at most {limits.max_tensors}, got {len(values)}")
        names = {_name(what, tensor) for tensor in values}
        if len(names) != len(values):
            raise InvalidRequestError(f"{what} have a name twice")
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequestError(
            f"raw_input_contents must have one entry for each of {len(request.inputs)} inputs, or "
            f"none at all, got {len(raw)}"
        )
    inputs = {}
    for position, tensor in enumerate(request.inputs):
        name = tensor.name
        dtype = dtype_of(tensor.datatype)
        shape = tensors.checked_shape(name, list(tensor.shape), limits.max_elements)
        if not raw:
            inputs[name] = _from_contents(tensor, dtype, shape)
        elif tensor.HasField("contents"):
            raise InvalidRequestError(f"input {name!r} has contents beside raw_input_contents")
        else:
            inputs[name] = tensors.from_bytes(name, dtype, shape, memoryview(raw[position]))
    outputs = tuple(tensor.name for tensor in request.outputs)
    return GrpcInference(inputs, outputs or None)


def _name(what: str, tensor: Any) -> str:
    if not tensor.name:
        raise InvalidRequestError(f"each of {what} must have a name")
    for name in _ELSEWHERE:
        if name in tensor.parameters:
            raise UnsupportedError(f"parameter {name} is not supported by this server")
    return tensor.name


def _from_contents(tensor: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise InvalidRequestError(
            f"input {tensor.name!r} of datatype {tensor.datatype} must come in raw_input_contents"
        )
    for other, values in tensor.contents.ListFields():
        if other.name != field and values:
            raise InvalidRequestError(
                f"input {tensor.name!r} of datatype {tensor.datatype} must have {field}, got "
                f"{other.name}"
            )
    values = getattr(tensor.contents, field)
    num_elements = int(np.prod(shape, dtype=np.int64))
    if len(values) != num_elements:
        raise InvalidRequestError(
            f"{field} of {tensor.name!r} of shape {list(shape)} must have {num_elements} elements, "
            f"got {len(values)}"
        )
    if dtype.hasobject:
        strings = np.empty(num_elements, dtype=object)
        strings[:] = list(values)
        return strings.reshape(shape)
    if dtype.kind == "f":  # messages hold these numbers as they are, NaN included
        return np.array(values, dtype=dtype).reshape(shape)
    return tensors.in_range(tensor.name, dtype, values).reshape(shape)


def written_answer(request_id: str, model: str, request: GrpcInference, answer: Answer) -> bytes:
    """The message, in bytes, that answers ``request``."""
    response = ModelInferResponse(model_name=model, model_version=answer.version, id=request_id)
    response.parameters["default_rows"].int64_param = int(answer.num_default_rows)
    for name in request.outputs or answer.outputs:
        array = answer.outputs[name]
        response.outputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
        response.raw_output_contents.append(tensors.to_bytes(array))
    return response.SerializeToString()
