"""Named tensors as bytes: a description in JSON and its length, and behind it their elements."""

import json
import math
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from torchembed.core.checks import dtype_name
from torchembed.streams.message_error import MessageError, MessageFault
from torchembed.streams.raw_tensors import bytes_of, tensor_of

_LENGTH = struct.Struct("<I")
_DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of named tensors, on any device, of which a GPU is waited for.

    Raises:
        TypeError: for a dtype that has no name in messages.
    """
    described, raw = [], []
    for name, tensor in tensors.items():
        if dtype_name(tensor.dtype) not in _DTYPES:
            raise TypeError(
                f"tensor {name} must have a dtype among {sorted(_DTYPES)}, got "
                f"{dtype_name(tensor.dtype)}; convert it"
            )
        described.append([name, dtype_name(tensor.dtype), list(tensor.shape)])
        raw.append(bytes_of(tensor))
    header = json.dumps(described, separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *raw])


def from_bytes(data: bytes) -> dict[str, Tensor]:
    """The inverse of :func:`to_bytes`.

    Raises:
        MessageError: where they are no such bytes.
    """
    tensors: dict[str, Tensor] = {}
    try:
        (header_bytes,) = _LENGTH.unpack_from(data)
        place = _LENGTH.size + header_bytes
        for name, dtype_of, shape in json.loads(data[_LENGTH.size : place]):
            dtype = _DTYPES[dtype_of]
            sizes = [_checked_size(size) for size in shape]
            end = place + math.prod(sizes) * dtype.itemsize
            if end > len(data) or name in tensors or not isinstance(name, str):
                raise ValueError(f"tensor {name!r} is cut off, or there twice")
            tensors[name] = tensor_of(data[place:end], dtype).view(sizes)
            place = end
    except (
        struct.error,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:
        raise MessageError(
            MessageFault.CONTENTS, f"a dense part does not hold what it says: {error}"
        ) from None
    if place != len(data):
        raise MessageError(
            MessageFault.TRAILING, f"a dense part of {place} bytes has {len(data)} of them"
        )
    return tensors


def _checked_size(size: object) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(f"a size must be a number from 0 on, got {size!r}")
    return size
