"""Batches of bags to test with: random ones, and the edge cases by name."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MISSING = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bags:
    """Rows of ``num_features * batch_size`` feature-major bags, jagged or of fixed hotness."""

    rows: Tensor
    """``[L]``; those after the last bag are -1."""
    lengths: list[int]
    num_features: int
    batch_size: int
    num_rows: int
    hotness: tuple[int, ...] | None = None

    @property
    def offsets(self) -> Tensor:
        """``[F * B + 1]``, int64, on the device of ``rows``."""
        ends = torch.tensor([0, *self.lengths]).cumsum(0)
        return ends.to(self.rows.device)

    def grouping(self, offsets_dtype: torch.dtype = torch.int64) -> dict[str, Any]:
        """The keyword arguments that tell an operation about the bags."""
        counts: dict[str, Any] = {"num_features": self.num_features, "batch_size": self.batch_size}
        if self.hotness is not None:
            return {"hotness": self.hotness, **counts}
        return {"offsets": self.offsets.to(offsets_dtype), **counts}

    def jagged(self) -> "Bags":
        """The same bags, told by offsets."""
        return dataclasses.replace(self, hotness=None)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Bags":
        """The same bags with ``rows`` on ``device``, as ``dtype``."""
        return dataclasses.replace(self, rows=self.rows.to(device, dtype))


def bags_of(
    lengths: Sequence[int], rows: Sequence[int] | Tensor, num_rows: int, num_features: int = 1
) -> Bags:
    """Jagged bags of given ``lengths [F * B]`` and ``rows``."""
    return Bags(
        rows=torch.as_tensor(rows, dtype=torch.int64),
        lengths=list(lengths),
        num_features=num_features,
        batch_size=len(lengths) // num_features if num_features else 0,
        num_rows=num_rows,
    )


def random_rows(num_ids: int, num_rows: int, seed: int, missing: float = 0.1) -> Tensor:
    """Rows skewed to the first ones, a part ``missing`` of them -1; the last row is among them."""
    generator = torch.Generator().manual_seed(seed)
    skewed = torch.rand(num_ids, generator=generator, dtype=torch.float64) ** 3
    rows = (skewed * num_rows).long().clamp_max(num_rows - 1)
    rows[torch.rand(num_ids, generator=generator) < missing] = MISSING
    rows[num_ids // 2 : num_ids // 2 + 1] = num_rows - 1
    return rows


def random_jagged(
    num_features: int,
    batch_size: int,
    num_rows: int,
    *,
    max_length: int = 6,
    missing: float = 0.1,
    seed: int = 0,
) -> Bags:
    """Jagged bags of 0 to ``max_length`` ids."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_features * batch_size,)
    lengths = torch.randint(max_length + 1, shape, generator=generator).tolist()
    rows = random_rows(sum(lengths), num_rows, seed + 1, missing)
    return bags_of(lengths, rows, num_rows, num_features)


def random_fixed(
    hotness: Sequence[int], batch_size: int, num_rows: int, *, missing: float = 0.1, seed: int = 0
) -> Bags:
    """Bags of ``hotness[f]`` ids for each feature."""
    lengths = [count for count in hotness for _ in range(batch_size)]
    rows = random_rows(sum(lengths), num_rows, seed, missing)
    return Bags(
        rows=rows,
        lengths=lengths,
        num_features=len(hotness),
        batch_size=batch_size,
        num_rows=num_rows,
        hotness=tuple(hotness),
    )


def _fixed(rows: Sequence[int], hotness: tuple[int, ...], batch_size: int, num_rows: int) -> Bags:
    lengths = [count for count in hotness for _ in range(batch_size)]
    jagged = bags_of(lengths, rows, num_rows, len(hotness))
    return dataclasses.replace(jagged, hotness=hotness, batch_size=batch_size)


EDGE_CASES: dict[str, Bags] = {
    "empty_batch": bags_of([], [], 5, num_features=2),
    "no_features": dataclasses.replace(bags_of([], [], 5, num_features=0), batch_size=3),
    "all_bags_empty": bags_of([0, 0, 0, 0], [], 5, num_features=2),
    "one_id": bags_of([1], [3], 5),
    "one_row": bags_of([2, 0, 1], [0, 0, 0], 1),
    "empty_bags_first_and_last": bags_of([0, 0, 2, 1, 0, 0], [4, 1, 1], 5, num_features=2),
    "all_ids_equal": bags_of([3, 2, 4, 1], [2] * 10, 5, num_features=2),
    "last_row": bags_of([1, 2], [6, 6, 6], 7),
    "all_missing": bags_of([2, 1], [MISSING] * 3, 5),
    "some_missing": bags_of([3, 1, 1], [MISSING, 4, MISSING, MISSING, 0], 5),
    "one_long_bag": bags_of([0, 150, 1], [7 * i % 11 for i in range(151)], 11),
    "spare_ids": bags_of([2, 0, 1, 1], [1, 4, 0, 2, MISSING, MISSING], 5, num_features=2),
    "spare_ids_alone": bags_of([0, 0], [MISSING, MISSING], 5),
    "spare_ids_without_a_batch": bags_of([], [MISSING, MISSING], 5, num_features=2),
    "fixed_empty_batch": _fixed([], (2, 1), 0, 5),
    "fixed_no_features": _fixed([], (), 3, 5),
    "fixed_zero_hotness": _fixed([4, 0, 2], (0, 1, 0), 3, 5),
    "fixed_one_hot": _fixed([4, 0, 2, 1, 1, MISSING], (1, 1), 3, 5),
}
