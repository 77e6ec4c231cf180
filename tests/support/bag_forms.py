"""Inputs of one embedding bag in each form that ``torch.nn.EmbeddingBag`` takes."""

import torch
from torch import Tensor

NUM_ROWS, DIM = 11, 6


def ids(*shape: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(NUM_ROWS, shape, generator=generator).to(dtype)


FORMS: dict[str, tuple[Tensor, Tensor | None, bool]] = {
    "fixed": (ids(4, 3), None, False),
    "fixed_without_bags": (ids(0, 3), None, False),
    "offsets": (ids(9, seed=1), torch.tensor([0, 2, 2, 8]), False),
    "last_offset": (ids(9, seed=1), torch.tensor([0, 2, 2, 8, 9]), True),
    "no_ids": (ids(0), torch.tensor([0, 0]), False),
    "no_bags": (ids(0), torch.tensor([0]), True),
}
