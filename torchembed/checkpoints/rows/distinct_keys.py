"""A check that many keys are distinct, in bounded memory."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torchembed.core.random_bits import mix64, shift_right

MAX_BYTES = 1 << 30
"""Memory that the check takes for keys, about."""
_BYTES_A_KEY = 32
"""Bytes that a kept key takes: it, its copies while keys are joined and sorted, and its place."""


def check_distinct(
    keys: Callable[[], Iterator[tuple[str, Tensor]]], num_keys: int, what: str
) -> None:
    """Read keys as often as it takes to compare all of them, a part of them each time.

    Args:
        keys: begins anew with each call: where keys are from, for errors, and int64 ``[n]``.
        num_keys: of all.
        what: holds the keys, for errors.

    Raises:
        ValueError: for a key that stands there more than once; it says where.
    """
    num_parts = max(-(-num_keys * _BYTES_A_KEY // MAX_BYTES), 1)
    for part in range(num_parts):
        # By hash, since keys may be multiples of any number.
        chosen = [
            batch if num_parts == 1 else batch[_part_of(batch, num_parts) == part]
            for _, batch in keys()
        ]
        ordered = torch.cat(chosen).sort().values if chosen else torch.empty(0, dtype=torch.int64)
        is_repeated = ordered[1:] == ordered[:-1]
        if is_repeated.any():
            key = int(ordered[int(is_repeated.int().argmax())])
            places = [place for place, batch in keys() for _ in range(int((batch == key).sum()))]
            raise ValueError(
                f"{what} must hold each key once, and holds {key} in {' and in '.join(places)}"
            )


def _part_of(keys: Tensor, num_parts: int) -> Tensor:
    """The part, in ``[0, num_parts)``, that each key belongs to."""
    return shift_right(mix64(keys), 33) * num_parts >> 31
