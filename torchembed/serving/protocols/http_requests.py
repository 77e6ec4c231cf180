"""Requests of the Open Inference Protocol over HTTP: JSON, with tensors in it or after it."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from torchembed.serving.datatypes import dtype_of
from torchembed.serving.interface import InvalidRequestError
from torchembed.serving.protocols import tensors
from torchembed.serving.protocols.options import RequestLimits
from torchembed.serving.protocols.refusals import TooLargeError, UnsupportedError

_ELSEWHERE = ("shared_memory_region", "classification")


class HttpInference(NamedTuple):
    """What a body asks of a model."""

    request_id: str | None
    inputs: dict[str, np.ndarray]
    outputs: tuple[str, ...] | None
    """Names of the outputs that are wanted; None for all."""
    binary_outputs: dict[str, bool]
    """Which of them are wanted as bytes, where the request says so."""
    binary_by_default: bool
    """Whether the others are."""


def json_object(body: memoryview, limits: RequestLimits) -> dict[str, Any]:
    """The JSON object that ``body`` is; an empty one where it is empty.

    Raises:
        InvalidRequestError: for anything else, for names that come twice in an object, for NaN and
            infinite numbers; :class:`TooLargeError` above ``limits.max_json_bytes``.
    """
    if len(body) > limits.max_json_bytes:
        raise TooLargeError(
            f"JSON must have at most {limits.max_json_bytes} bytes, got {len(body)}; send tensors "
            "in binary form"
        )
    if not body:
        return {}
    try:
        value = json.loads(
            str(body, "utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant
        )
    except InvalidRequestError:
        raise
    except RecursionError as error:
        raise InvalidRequestError("JSON is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequestError(f"body must be JSON in UTF-8: {str(error)[:200]}") from error
    if type(value) is not dict:
        raise InvalidRequestError(f"JSON must be an object, got {type(value).__name__}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise InvalidRequestError("JSON has an object with a name that comes twice")
    return values


def _refuse_constant(text: str) -> NoReturn:
    raise InvalidRequestError(f"JSON has no {text}; send such numbers in binary form")


def read_inference(
    body: bytearray, json_length: int | None, limits: RequestLimits
) -> HttpInference:
    """Read the body of a request; its tensors may share its memory.

    Args:
        json_length: bytes of the JSON part, which tensors as bytes follow; None where none do.

    Raises:
        InvalidRequestError: for all that the protocol does not allow.
    """
    view = memoryview(body)
    binary = None
    if json_length is not None:
        if not 0 < json_length <= len(body):
            raise InvalidRequestError(
                "Inference-Header-Content-Length must be between 1 and the body's length "
                f"{len(body)}, got {json_length}"
            )
        # A copy of its own, for arrays that begin at its start to be aligned.
        binary = memoryview(bytearray(view[json_length:]))
        view = view[:json_length]
    request = json_object(view, limits)
    request_id = request.get("id")
    if request_id is not None and type(request_id) is not str:
        raise InvalidRequestError("id must be a string")
    outputs = _outputs(request, limits)
    return HttpInference(
        request_id=request_id,
        inputs=_inputs(request, binary, limits),
        outputs=None if outputs is None else tuple(outputs),
        binary_outputs={
            name: wanted for name, wanted in (outputs or {}).items() if wanted is not None
        },
        binary_by_default=bool(_flag(_parameters(request), "binary_data_output")),
    )


def _inputs(
    request: dict[str, Any], binary: memoryview | None, limits: RequestLimits
) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    num_bytes = 0
    for tensor, name in _tensors(request.get("inputs"), "inputs", limits):
        parameters = _parameters(tensor)
        dtype = dtype_of(tensor.get("datatype"))
        shape = tensors.checked_shape(name, tensor.get("shape"), limits.max_elements)
        size = parameters.get("binary_data_size")
        if size is None:
            if "data" not in tensor:
                raise InvalidRequestError(f"input {name!r} must have data or binary_data_size")
            arrays[name] = tensors.from_json(name, dtype, shape, tensor["data"])
            continue
        if type(size) is not int or size < 0:
            raise InvalidRequestError(f"binary_data_size of {name!r} must be 0 or more")
        if "data" in tensor:
            raise InvalidRequestError(f"input {name!r} must have data or bytes, not both")
        if binary is None or num_bytes + size > len(binary):
            raise InvalidRequestError(
                f"input {name!r} says binary_data_size {size}, and the body ends before that; "
                "Inference-Header-Content-Length must say how long the JSON part is"
            )
        arrays[name] = tensors.from_bytes(name, dtype, shape, binary[num_bytes : num_bytes + size])
        num_bytes += size
    if binary is not None and num_bytes != len(binary):
        raise InvalidRequestError(
            f"the inputs say {num_bytes} bytes after the JSON part, got {len(binary)}"
        )
    return arrays


def _outputs(request: dict[str, Any], limits: RequestLimits) -> dict[str, bool | None] | None:
    if request.get("outputs") is None or request["outputs"] == []:
        return None
    return {
        name: _flag(_parameters(tensor), "binary_data")
        for tensor, name in _tensors(request["outputs"], "outputs", limits)
    }


def _tensors(
    values: object, what: str, limits: RequestLimits
) -> Iterable[tuple[dict[str, Any], str]]:
    if type(values) is not list:
        raise InvalidRequestError(f"{what} must be a list of tensors")
    if len(values) > limits.max_tensors:
        raise TooLargeError(f"{what} must be at most {limits.max_tensors}, got {len(values)}")
    seen: set[str] = set()
    for tensor in values:
        name = tensor.get("name") if type(tensor) is dict else None
        if type(name) is not str or not name:
            raise InvalidRequestError(f"each of {what} must be an object with a name")
        if name in seen:
            raise InvalidRequestError(f"{what} have {name!r} twice")
        seen.add(name)
        yield tensor, name


def _parameters(owner: dict[str, Any]) -> dict[str, Any]:
    parameters = owner.get("parameters")
    if parameters is None:
        return {}
    if type(parameters) is not dict:
        raise InvalidRequestError("parameters must be an object")
    for name in _ELSEWHERE:
        if parameters.get(name):
            raise UnsupportedError(f"parameter {name} is not supported by this server")
    return parameters


def _flag(parameters: dict[str, Any], name: str) -> bool | None:
    value = parameters.get(name)
    if value is not None and type(value) is not bool:
        raise InvalidRequestError(f"parameter {name} must be true or false")
    return value
