"""JSON whose last field is a checksum of the rest, so that damage to it is noticed."""

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

_WITH_CHECKSUM = re.compile(rb'(?P<fields>.*), "crc32": "(?P<crc32>[0-9a-f]{8})"\}', re.DOTALL)


def to_checked_json(fields: Mapping[str, object]) -> bytes:
    """One object of ``fields``, at least one, and behind them ``crc32``: the CRC-32 of all bytes
    before it."""
    text = json.dumps(fields).encode()[:-1]
    return text + f', "crc32": "{zlib.crc32(text):08x}"}}'.encode()


def from_checked_json(content: bytes, *, is_required: bool = True) -> Any:
    """The items of ``content`` without its checksum.

    Args:
        is_required: False takes content without a checksum as well, unchecked.

    Raises:
        ValueError: if ``content`` is no JSON, or not what the checksum is of.
    """
    found = _WITH_CHECKSUM.fullmatch(content)
    if found is not None:
        wanted = zlib.crc32(found["fields"])
        if int(found["crc32"], 16) != wanted:
            raise ValueError(f"checksum must be {wanted:08x}, got {found['crc32'].decode()}")
        content = found["fields"] + b"}"
    elif is_required:
        raise ValueError("a checksum must be its last field, and there is none")
    return json.loads(content)
