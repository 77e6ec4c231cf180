"""Batches come with a fixed hotness exactly where every bag of a key has as many ids as before."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LENGTHS: dict[str, tuple[Sequence[str], list[int], int]] = {
    "fixed": ("ab", [2, 2, 1, 1], 6),
    "fixed once more": ("ab", [2, 2, 1, 1], 6),
    "of other keys": ("abcd", [2, 2, 1, 1], 6),
    "varying": ("ab", [2, 1, 2, 1], 6),
    "swapped": ("ab", [1, 1, 2, 2], 6),
    "as at first": ("ab", [2, 2, 1, 1], 6),
    "with a value too many": ("ab", [2, 2, 1, 1], 7),
}
"""Keys, lengths and number of ids of one batch after the other, in the same memory."""
FOUND = {
    "fixed": (2, 1),
    "fixed once more": (2, 1),
    # One hotness has captured steps.
    "of other keys": None,
    "varying": None,
    "swapped": None,
    "as at first": (2, 1),
    "with a value too many": None,
}


def hotness_of_batches(dtype: torch.dtype) -> dict[str, Any]:
    """The hotness of each batch, as it was read."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from torchembed.integrations.torchrec.batches.conversion import BatchReader

    reader, found = BatchReader(None, torch.device("cpu")), {}
    memory = torch.zeros(4, dtype=dtype)
    for name, (keys, lengths, num_ids) in LENGTHS.items():
        memory.copy_(torch.tensor(lengths))
        values: Tensor = torch.arange(num_ids)
        batch = KeyedJaggedTensor(keys=list(keys), values=values, lengths=memory)
        (features,) = reader.read(iter([batch]))
        found[name] = features.hotness  # type: ignore[union-attr]
    return found


def everything(device_type: str) -> dict[str, Any]:
    """On a rank."""
    del device_type  # batches are read on the CPU
    return {str(dtype): hotness_of_batches(dtype) for dtype in (torch.int32, torch.int64)}


def test_hotness_is_found_anew_where_lengths_change(answers: list[dict[str, Any]]) -> None:
    for found in answers[0]["batch_reader"].values():
        assert found == FOUND
