"""Batches have a fixed hotness exactly where all bags of a key have equally many ids."""

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
    "empty": ("ab", [0, 0, 0, 0], 0),
    "empty, of other keys": ("abcd", [0, 0, 0, 0], 0),
}
"""Keys, lengths and number of ids of one batch after the other, in the same memory."""
FOUND = {
    "fixed": ((2, 1),),
    "fixed once more": ((2, 1),),
    "of other keys": ((2, 2, 1, 1),),
    "varying": None,
    "swapped": ((1, 2),),
    "as at first": ((2, 1),),
    "with a value too many": None,
    "empty": ((0, 0),),
    "empty, of other keys": ((0, 0, 0, 0),),
}


def hotness_of_batches(dtype: torch.dtype) -> dict[str, Any]:
    """The hotness that each batch is found to have."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from torchembed.integrations.torchrec.batches.conversion import BatchReader

    reader, found = BatchReader(None, torch.device("cpu")), {}
    memory = torch.zeros(4, dtype=dtype)
    for name, (keys, lengths, num_ids) in LENGTHS.items():
        memory.copy_(torch.tensor(lengths))
        values: Tensor = torch.arange(num_ids)
        batch = KeyedJaggedTensor(keys=list(keys), values=values, lengths=memory)
        found[name] = reader._hotness(batch)
        (features,) = reader.read(iter([batch]))
        # One hotness, the first, has captured steps.
        expected = found[name][0] if found[name] == FOUND["fixed"] else None
        assert features.hotness == expected  # type: ignore[union-attr]
    return found


def everything(device_type: str) -> dict[str, Any]:
    """On a rank."""
    del device_type  # batches are read on the CPU
    return {str(dtype): hotness_of_batches(dtype) for dtype in (torch.int32, torch.int64)}


def test_hotness_is_found_anew_where_lengths_change(answers: list[dict[str, Any]]) -> None:
    for found in answers[0]["batch_reader"].values():
        assert found == FOUND
