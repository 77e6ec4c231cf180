"""Caches of random lines that hold some keys, and ids that are looked up in them."""

import dataclasses
import functools

import torch
from torch import Tensor

from tests.support.hash_tables import EXTREME_KEYS
from torchembed.core.cached_lookups import line_bytes
from torchembed.core.hash_tables import KeyInsertion
from torchembed.ops.cached_lookup import FoundLines, cached_lookup
from torchembed.ops.hash_table import (
    HashTables,
    Policy,
    empty_hash_tables,
    slot_ranges,
    table_shape,
)
from torchembed.ops.hash_table.reference import insert_keys_reference

SHAPES = [table_shape(capacity)._replace(num_spare=1) for capacity in (5, 300, 40)]


@dataclasses.dataclass
class Cache:
    """Tables of some keys, with a line of random bits in each slot and behind them."""

    tables: HashTables
    lines: Tensor
    dtype: torch.dtype
    dim: int
    held: list[tuple[int, int]]

    @property
    def progress(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int64, device=self.lines.device)

    def look_up(
        self, keys: Tensor, tables: Tensor, progress: Tensor | None = None, **options: object
    ) -> FoundLines:
        return cached_lookup(
            self.tables,
            keys,
            tables,
            self.lines,
            line_dtype=self.dtype,
            dim=self.dim,
            progress=self.progress if progress is None else progress,
            **options,  # type: ignore[arg-type]
        )

    def expected(self, slots: Tensor) -> Tensor:
        """The rows of ``slots``, decoded one by one."""
        rows = torch.zeros(len(slots), self.dim)
        for place, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            line, size = self.lines[slot].cpu(), self.dtype.itemsize
            begin = 4 if size == 1 else 0
            values = line[begin : begin + self.dim * size].clone().view(self.dtype).float()
            rows[place] = values * line[:4].clone().view(torch.float32) if size == 1 else values
        return rows


@functools.cache
def filled_tables() -> tuple[HashTables, list[tuple[int, int]]]:
    """Tables on the CPU, filled by the reference, and the keys and tables that they hold."""
    held = [(key, 0) for key in EXTREME_KEYS[:4]] + [(key, 1) for key in range(-60, 60)]
    held += [(key, 2) for key in EXTREME_KEYS]
    tables = empty_hash_tables(SHAPES, Policy.LRU)
    keys = torch.tensor([key for key, _ in held])
    one, none = torch.ones(1, dtype=torch.int64), torch.full_like(keys, -1)
    of_tables = torch.tensor([table for _, table in held], dtype=torch.int32)
    scoring = (None, int(Policy.LRU), one, None, torch.zeros_like(one), None, None)
    insert_keys_reference(KeyInsertion(keys, of_tables, none, *scoring, *tables))
    return tables, held


def cache(dtype: torch.dtype, dim: int, device: torch.device, seed: int = 0) -> Cache:
    filled, held = filled_tables()
    tables = HashTables(*[None if t is None else t.to(device, copy=True) for t in filled])  # type: ignore[arg-type]
    num_lines = slot_ranges(SHAPES)[-1].end
    generator = torch.Generator().manual_seed(seed)
    if dtype.itemsize == 1:
        shape = num_lines, line_bytes(dtype, dim)
        lines = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.rand(num_lines, 1, generator=generator)
        lines[:, :4] = scales.view(torch.uint8)
    else:
        rows = torch.randn(num_lines, dim, generator=generator).to(dtype)
        lines = rows.view(torch.uint8).view(num_lines, line_bytes(dtype, dim))
    return Cache(tables, lines.to(device), dtype, dim, held)


def batch(device: torch.device, num_ids: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Ids that are held, that are not, and no ids."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-90, 90, (num_ids,), generator=generator)
    keys[::5] = torch.tensor(EXTREME_KEYS * num_ids)[: len(keys[::5])]
    tables = torch.randint(-1, 3, (num_ids,), generator=generator, dtype=torch.int32)
    return keys.to(device), tables.to(device)


def assert_same_numbers(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def held_ids(made: Cache) -> tuple[Tensor, Tensor]:
    device = made.lines.device
    keys = torch.tensor([key for key, _ in made.held], device=device)
    return keys, torch.tensor([t for _, t in made.held], dtype=torch.int32, device=device)
