"""Messages of HugeCTR's parameter server: pairs of a key and a vector, and nothing else."""

import struct
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchembed.core.checks import check_dtype
from torchembed.streams.message_error import MessageError, MessageFault

MAGIC = b"HCTR"
_HEADER = struct.Struct("<4sI")
HEADER_BYTES = _HEADER.size
KEY_DTYPES = {4: torch.uint32, 8: torch.int64}
"""By the bytes of a key."""
_ITEM_BYTES = 4


class HugeCTRPairs(NamedTuple):
    """The contents of a message; a beacon, which only tests the connection, has no pairs."""

    keys: Tensor
    """int64 ``[n]``; keys of 4 bytes are at least 0."""
    rows: Tensor
    """float32 ``[n, D]``."""


def check_key_bytes(key_bytes: int) -> None:
    """Raise ``ValueError`` unless HugeCTR has keys of that size."""
    if key_bytes not in KEY_DTYPES:
        raise ValueError(f"key_bytes must be one of {sorted(KEY_DTYPES)}, got {key_bytes}")


def encode_pairs(keys: Tensor, rows: Tensor, key_bytes: int = 8) -> bytes:
    """The message of some keys and their vectors; without any it is a beacon.

    Args:
        keys: int64 ``[n]``; from 0 to 2^32 - 1 where they have 4 bytes.
        rows: float32 ``[n, D]``.
        key_bytes: 4 or 8.
    """
    check_key_bytes(key_bytes)
    check_dtype("keys", keys, (torch.int64,), "call .long()")
    check_dtype("rows", rows, (torch.float32,), "call .float()")
    if keys.dim() != 1 or rows.dim() != 2 or len(keys) != len(rows):
        raise ValueError(
            f"keys [n] and rows [n, D] must fit, got {tuple(keys.shape)} and {tuple(rows.shape)}"
        )
    if key_bytes == 4 and len(keys) and not 0 <= int(keys.min()) <= int(keys.max()) < 2**32:
        raise ValueError(
            f"keys must be from 0 to 2^32 - 1 to have 4 bytes, got {int(keys.min())} to "
            f"{int(keys.max())}; use keys of 8 bytes"
        )
    header = _HEADER.pack(MAGIC, rows.shape[1] * _ITEM_BYTES)
    if not len(keys):
        return header
    raw_keys = _raw_lines(keys)[:, :key_bytes]
    return header + np.concatenate([raw_keys, _raw_lines(rows)], axis=1).tobytes()


def _raw_lines(tensor: Tensor) -> np.ndarray:
    """The bytes of each of some elements, uint8 ``[n, bytes]``."""
    lines = tensor.detach().cpu().contiguous().reshape(len(tensor), -1)
    return lines.view(torch.uint8).numpy()


def decode_pairs(data: bytes, key_bytes: int = 8) -> HugeCTRPairs:
    """The inverse of :func:`encode_pairs`.

    Raises:
        MessageError: where ``data`` is no such message. There is no checksum: values that changed
            on their way go unnoticed.
    """
    check_key_bytes(key_bytes)
    if len(data) < HEADER_BYTES:
        fault = MessageFault.TRUNCATED if MAGIC.startswith(data[:4]) else MessageFault.MAGIC
        raise MessageError(fault, f"a message must have {HEADER_BYTES} bytes, got {len(data)}")
    magic, value_bytes = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise MessageError(MessageFault.MAGIC, f"a message must begin with {MAGIC!r}, got {magic}")
    pairs_bytes = len(data) - HEADER_BYTES
    if pairs_bytes == 0:
        # Of any width: that of a beacon is a number without meaning.
        return HugeCTRPairs(torch.empty(0, dtype=torch.int64), torch.empty(0, 0))
    if value_bytes == 0 or value_bytes % _ITEM_BYTES:
        raise MessageError(
            MessageFault.CONTENTS, f"vectors must have a multiple of 4 bytes, got {value_bytes}"
        )
    num_pairs, rest = divmod(pairs_bytes, key_bytes + value_bytes)
    if rest:
        raise MessageError(
            MessageFault.TRUNCATED,
            f"pairs of {key_bytes} and {value_bytes} bytes must fill a message, got {pairs_bytes}",
        )
    raw = np.frombuffer(data, np.uint8, offset=HEADER_BYTES).reshape(num_pairs, -1)
    keys = torch.from_numpy(raw[:, :key_bytes].copy()).view(KEY_DTYPES[key_bytes]).view(-1)
    rows = torch.from_numpy(raw[:, key_bytes:].copy()).view(torch.float32)
    return HugeCTRPairs(keys.long(), rows)
