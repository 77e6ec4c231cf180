"""Shared by the tests of readers: rows to write, and everything that a source yields."""

import os
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from torchembed.data import Batch, BatchSource


class Rows(NamedTuple):
    """Rows of a click log; None is a missing field."""

    labels: list[int]
    counts: list[list[int | None]]
    ids: list[list[int | None]]


def random_rows(num_rows: int, seed: int = 0, largest_id: int = (1 << 32) - 1) -> Rows:
    """Rows of Criteo's 13 counts and 26 ids, one field in ten missing."""
    random = np.random.default_rng(seed)

    def columns(low: int, high: int, width: int) -> list[list[int | None]]:
        numbers = random.integers(low, high, (num_rows, width), endpoint=True).tolist()
        missing = random.random((num_rows, width)) < 0.1
        return [
            [None if gone else number for number, gone in zip(*row, strict=True)]
            for row in zip(numbers, missing, strict=True)
        ]

    labels = random.integers(0, 2, num_rows).tolist()
    return Rows(labels, columns(-2, 5000, 13), columns(0, largest_id, 26))


def as_text(rows: Rows) -> str:
    """The rows as Criteo's text."""
    return "".join(
        "\t".join(
            [
                str(label),
                *("" if count is None else str(count) for count in counts),
                *("" if id_ is None else f"{id_:08x}" for id_ in ids),
            ]
        )
        + "\n"
        for label, counts, ids in zip(*rows, strict=True)
    )


class Samples(NamedTuple):
    """Samples of several batches; ``ids[f][b]`` is a bag."""

    dense: Tensor
    ids: list[list[list[int]]]
    labels: Tensor


def samples(batches: Iterable[Batch]) -> Samples:
    """Everything in ``batches``, in order."""
    batches = list(batches)
    ids: list[list[list[int]]] = [[] for _ in batches[0].sparse.keys]
    for _, sparse, labels in batches:
        assert sparse.batch_size == len(labels)
        if sparse.offsets is not None:
            lengths = sparse.offsets.diff().view(len(ids), -1)
        else:
            assert sparse.hotness is not None
            lengths = torch.tensor(sparse.hotness)[:, None].expand(-1, len(labels))
        bags = iter(sparse.values.split(lengths.flatten().tolist()))
        for column in ids:
            column += [next(bags).tolist() for _ in labels]
    return Samples(
        torch.cat([batch.dense for batch in batches]),
        ids,
        torch.cat([batch.labels for batch in batches]),
    )


def in_turn(sources: Sequence[BatchSource]) -> list[Batch]:
    """The batches of ranks that take blocks in turn, in the order of the rows."""
    for source in sources:
        assert len(source) == len(list(source))
    rounds = zip_longest(*sources)
    return [batch for batches in rounds for batch in batches if batch is not None]


def assert_same_samples(got: Samples, expected: Samples) -> None:
    torch.testing.assert_close(got.dense, expected.dense, rtol=0, atol=0)
    torch.testing.assert_close(got.labels, expected.labels, rtol=0, atol=0)
    assert got.ids == expected.ids


def real_data(folder: str) -> Path:
    """A folder of real data; the test is skipped where there is none."""
    beside = Path(__file__).parents[3] / "shared" / "data"
    root = Path(os.environ.get("TORCHEMBED_DATA", beside))
    if not (root / folder).is_dir():
        pytest.skip(f"no real data at {root / folder}; set TORCHEMBED_DATA to its folder")
    return root / folder
