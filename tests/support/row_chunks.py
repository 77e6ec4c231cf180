"""Rows by key to write and read, and what came of them."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from torchembed.tables import RowChunk

SPECIAL_KEYS = (0, -1, 1, -(2**63), 2**63 - 1)
"""Keys that an implementation might reserve; -1 has the bits of the greatest unsigned one."""


class Row(NamedTuple):
    """One key's part of a stream."""

    values: list[float]
    states: dict[str, float | list[float]]
    score: int | None
    touched: int | None


def made_chunk(keys: Iterable[int], dim: int = 3, dtype: torch.dtype = torch.float32) -> RowChunk:
    """A chunk of all columns, whose values are functions of the key."""
    of_key = torch.tensor(list(keys), dtype=torch.int64)
    base = (of_key % 61).double()
    columns = torch.arange(dim) / 4
    return RowChunk(
        keys=of_key,
        rows=(base[:, None] + columns).to(dtype),
        states={"exp_avg": (base[:, None] * 2 + columns).float(), "sum": base.float() + 0.5},
        scores=of_key % 7,
        touched=of_key % 5 + 1,
    )


def rows_by_key(chunks: Iterable[RowChunk]) -> dict[int, Row]:
    """All rows of a stream; a key may come once, on the CPU."""
    found: dict[int, Row] = {}
    for chunk in chunks:
        assert chunk.keys.dtype == torch.int64 and chunk.keys.device.type == "cpu"
        for place, key in enumerate(chunk.keys.tolist()):
            assert key not in found
            found[key] = Row(
                chunk.rows[place].tolist(),
                {name: state[place].tolist() for name, state in chunk.states.items()},
                None if chunk.scores is None else int(chunk.scores[place]),
                None if chunk.touched is None else int(chunk.touched[place]),
            )
    return found
