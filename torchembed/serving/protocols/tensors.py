"""Tensors as bytes and as JSON's values, as the Open Inference Protocol writes them."""

import math
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from torchembed.serving.interface import InvalidRequestError
from torchembed.serving.protocols.refusals import TooLargeError

_MAX_RANK = 32  # of arrays of every numpy since 1.26
_LENGTH = struct.Struct("<I")
_INTEGER = {int}
_NUMBER = {int, float}


def checked_shape(name: str, shape: object, max_elements: int) -> tuple[int, ...]:
    """``shape`` as a tuple, of at most ``max_elements`` elements.

    Raises:
        InvalidRequestError: for what is not a list of lengths; :class:`TooLargeError` for too many
            elements. Empty dims count as 1, so that the others are bounded too.
    """
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) > _MAX_RANK:
        raise InvalidRequestError(
            f"shape of {name!r} must be a list of at most {_MAX_RANK} lengths"
        )
    num_elements = 1
    for length in shape:
        if type(length) is not int or length < 0:
            raise InvalidRequestError(
                f"shape of {name!r} must have lengths of 0 or more, got {str(length)[:40]}"
            )
        num_elements *= length or 1
    if num_elements > max_elements:
        raise TooLargeError(
            f"{name!r} must have at most {max_elements} elements, and its shape has more"
        )
    return tuple(shape)


def from_bytes(name: str, dtype: np.dtype, shape: tuple[int, ...], data: memoryview) -> np.ndarray:
    """The array that ``data`` holds: little-endian, row-major; each string after its uint32 length.

    It shares the memory of ``data`` where that is writable and aligned, and is writable always.

    Raises:
        InvalidRequestError: where the length does not fit the shape.
    """
    num_elements = math.prod(shape)
    if dtype.hasobject:
        return _strings(name, num_elements, data).reshape(shape)
    if len(data) != num_elements * dtype.itemsize:
        raise InvalidRequestError(
            f"{name!r} of shape {list(shape)} must have {num_elements * dtype.itemsize} bytes, "
            f"got {len(data)}"
        )
    array = np.frombuffer(data, dtype.newbyteorder("<"), num_elements).reshape(shape)
    if not array.flags.writeable or not array.flags.aligned:
        array = array.copy()
    if dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
        raise InvalidRequestError(f"{name!r} of datatype BOOL must have bytes of 0 and 1 alone")
    return array


def _strings(name: str, num_elements: int, data: memoryview) -> np.ndarray:
    if len(data) < num_elements * _LENGTH.size:
        raise InvalidRequestError(
            f"{name!r} must have {num_elements} strings, each after its length of 4 bytes, got "
            f"{len(data)} bytes in all"
        )
    strings = np.empty(num_elements, dtype=object)
    at = 0
    for position in range(num_elements):
        begin = at + _LENGTH.size
        if begin > len(data):
            raise InvalidRequestError(f"{name!r} ends before its string {position}")
        at = begin + _LENGTH.unpack_from(data, begin - _LENGTH.size)[0]
        if at > len(data):
            raise InvalidRequestError(f"{name!r} ends within its string {position}")
        strings[position] = bytes(data[begin:at])
    if at != len(data):
        raise InvalidRequestError(f"{name!r} has {len(data) - at} bytes after its last string")
    return strings


def to_bytes(array: np.ndarray) -> bytes:
    """The bytes of an array as :func:`from_bytes` reads them."""
    if array.dtype.kind not in "OSU":
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    strings = [_encoded(text) for text in array.ravel().tolist()]
    return b"".join(chain.from_iterable((_LENGTH.pack(len(text)), text) for text in strings))


def _encoded(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def from_json(name: str, dtype: np.dtype, shape: tuple[int, ...], data: object) -> np.ndarray:
    """The array of JSON's values ``data``: a flat list, or lists in lists as ``shape`` has it.

    Raises:
        InvalidRequestError: for values of another kind, or out of the datatype's range, and where
            their number does not fit the shape.
    """
    values = _flat(name, shape, data)
    kinds = set(map(type, values))
    if dtype.hasobject:
        return _texts(name, values, kinds).reshape(shape)
    allowed = {bool} if dtype.kind == "b" else _NUMBER if dtype.kind == "f" else _INTEGER
    if not kinds <= allowed:
        wanted = {"b": "true or false", "f": "numbers"}.get(dtype.kind, "integers")
        raise InvalidRequestError(f"data of {name!r} must be {wanted} alone")
    return in_range(name, dtype, values).reshape(shape)


def in_range(name: str, dtype: np.dtype, values: Sequence[Any]) -> np.ndarray:
    """The array ``[n]`` of Python's numbers.

    Raises:
        InvalidRequestError: for numbers that ``dtype`` cannot hold.
    """
    if dtype.kind == "b" or not values:
        return np.array(values, dtype=dtype)
    if dtype.kind == "f":
        return _floats(name, dtype, values)
    limits = np.iinfo(dtype)
    if min(values) < limits.min or max(values) > limits.max:
        raise InvalidRequestError(
            f"data of {name!r} must be between {limits.min} and {limits.max}, as {dtype} is"
        )
    return np.array(values, dtype=dtype)


def _floats(name: str, dtype: np.dtype, values: Sequence[Any]) -> np.ndarray:
    refusal = f"data of {name!r} must be within {-np.finfo(dtype).max} and {np.finfo(dtype).max}"
    try:
        wide = np.array(values, dtype=np.float64)
    except OverflowError as error:
        raise InvalidRequestError(refusal) from error
    with np.errstate(over="ignore"):
        narrow = wide.astype(dtype, copy=False)
    if not np.isfinite(narrow).all():
        raise InvalidRequestError(refusal)
    return narrow


def _flat(name: str, shape: tuple[int, ...], data: object) -> list[Any]:
    if not isinstance(data, list):
        raise InvalidRequestError(f"data of {name!r} must be a list")
    values: list[Any] = data
    if any(type(value) is list for value in values):
        for length in shape[1:]:
            if not all(type(value) is list and len(value) == length for value in values):
                raise InvalidRequestError(
                    f"data of {name!r} must be a flat list, or lists in lists of shape "
                    f"{list(shape)}"
                )
            values = list(chain.from_iterable(values))
    if len(values) != math.prod(shape):
        raise InvalidRequestError(
            f"data of {name!r} of shape {list(shape)} must have {math.prod(shape)} elements, got "
            f"{len(values)}"
        )
    return values


def _texts(name: str, values: list[Any], kinds: set[type]) -> np.ndarray:
    if not kinds <= {str}:
        raise InvalidRequestError(f"data of {name!r} must be strings alone")
    texts = np.empty(len(values), dtype=object)
    try:
        texts[:] = [text.encode() for text in values]
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"data of {name!r} has half of a surrogate pair; send such strings in binary form"
        ) from error
    return texts


def to_json(name: str, array: np.ndarray) -> list[Any]:
    """The values of an array as a flat list that JSON can hold.

    Raises:
        InvalidRequestError: for infinite numbers, NaN, and strings that are not UTF-8.
    """
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidRequestError(
            f"output {name!r} holds NaN or infinite numbers, which JSON has not; ask for it in "
            "binary form"
        )
    values = array.ravel().tolist()
    if array.dtype.kind not in "OS":
        return values
    try:
        return [text.decode() if isinstance(text, bytes) else text for text in values]
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"output {name!r} holds strings that are not UTF-8; ask for it in binary form"
        ) from error
