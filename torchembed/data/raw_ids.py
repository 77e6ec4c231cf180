"""64-bit ids of categorical values as they stand, without numbering them first.

A whole number is its own id. The id of a text is the 64-bit FNV-1a hash of its UTF-8 bytes
(http://www.isthe.com/chongo/tech/comp/fnv), as a signed integer: starting with
``h = 0xcbf29ce484222325``, ``h = (h ^ byte) * 0x100000001b3 mod 2**64`` for each byte in turn. It
is the same in every process and on every machine, and three lines in any language. A missing value
is ``MISSING_ID``.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MISSING_ID = -(1 << 63)
"""The id of a missing value: the least int64, which hardly any data has as a number."""

_OFFSET_BASIS, _PRIME = 0xCBF29CE484222325, 0x100000001B3


def text_ids(texts: Sequence[str]) -> NDArray[np.int64]:
    """The ids of ``texts [N]``, int64."""
    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)])
    return ids_of_bytes(np.frombuffer(b"".join(encoded), np.uint8), offsets)


def ids_of_bytes(data: NDArray[np.uint8], offsets: NDArray[np.integer]) -> NDArray[np.int64]:
    """The ids of N texts that lie one after the other.

    Args:
        data: their UTF-8 bytes.
        offsets: ``[N + 1]``: text i is ``data[offsets[i]:offsets[i + 1]]``.

    Returns:
        int64 ``[N]``.
    """
    starts, ends = offsets[:-1].astype(np.int64), offsets[1:].astype(np.int64)
    hashes = np.full(len(starts), _OFFSET_BASIS, np.uint64)
    # Byte by byte of all texts at once; those that have ended drop out.
    (going_on,) = np.nonzero(starts < ends)
    place = starts[going_on]
    while len(going_on):
        hashes[going_on] = (hashes[going_on] ^ data[place]) * np.uint64(_PRIME)
        place = place + 1
        is_inside = place < ends[going_on]
        going_on, place = going_on[is_inside], place[is_inside]
    return hashes.view(np.int64)
