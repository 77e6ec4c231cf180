"""Lookups in caches, against the bytes of each line in Python."""

import dataclasses
import functools

import pytest
import torch
from torch import Tensor

from tests.support.hash_tables import EXTREME_KEYS
from tests.support.tracing import compiled_once
from torchembed.core.cached_lookups import LINE_DTYPES, line_bytes
from torchembed.core.hash_tables import KeyInsertion
from torchembed.ops.cached_lookup import FoundLines, LineCopies, LineUse, cached_lookup
from torchembed.ops.hash_table import (
    Counter,
    HashTables,
    Policy,
    empty_hash_tables,
    find_slots,
    slot_ranges,
    table_shape,
)
from torchembed.ops.hash_table.reference import insert_keys_reference

SHAPES = [table_shape(capacity)._replace(num_spare=1) for capacity in (5, 300, 40)]
DIMS = (1, 130)


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


@pytest.mark.parametrize("num_ids", [0, 1, 50])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", LINE_DTYPES)
def test_rows_are_the_lines_of_their_slots(
    dtype: torch.dtype, dim: int, num_ids: int, device: torch.device
) -> None:
    made = cache(dtype, dim, device)
    keys, tables = batch(device, num_ids)
    before = [tensor.clone() for tensor in made.tables if tensor is not None]
    found = made.look_up(keys, tables)
    held = set(made.held)
    pairs = list(zip(keys.tolist(), tables.tolist(), strict=True))
    lacking = [table >= 0 and (key, table) not in held for key, table in pairs]
    assert found.is_missing.tolist() == lacking
    assert found.num_missing.tolist() == [sum(lacking)]
    ends = [slots.end - 1 for slots in slot_ranges(SHAPES)]
    slots = find_slots(made.tables, keys, tables).tolist()
    expected = [
        ends[table] if missing else slot
        for slot, missing, (_, table) in zip(slots, lacking, pairs, strict=True)
    ]
    assert found.slots.tolist() == expected
    assert_same_numbers(found.rows, made.expected(found.slots))
    for old, new in zip(before, (t for t in made.tables if t is not None), strict=True):
        assert torch.equal(old, new)
    only_found = made.look_up(keys, tables, reads=False)
    assert only_found.rows.shape == (0, dim)
    for one, other in zip(only_found[1:], found[1:], strict=True):
        assert torch.equal(one, other)


def test_uses_are_noted_call_after_call(device: torch.device) -> None:
    made = cache(torch.float32, 4, device)
    epoch, progress = torch.full((1,), 6, device=device), made.progress
    hits = [0, 0, 0]
    misses = [0, 0, 0]
    last_use = dict.fromkeys(find_slots(made.tables, *held_ids(made)).tolist(), 1)
    for number in range(3):
        keys, tables = batch(device, 70, seed=number)
        found = made.look_up(keys, tables, progress, use=LineUse(epoch))
        assert epoch.tolist() == [7 + number] and progress.tolist() == [0]
        lists = (found.slots.tolist(), tables.tolist(), found.is_missing.tolist())
        for slot, table, is_missing in zip(*lists, strict=True):
            if table >= 0:
                (misses if is_missing else hits)[table] += 1
            if table >= 0 and not is_missing:
                last_use[slot] = 7 + number
    counters = made.tables.counters
    assert counters[:, Counter.HITS].tolist() == hits
    assert counters[:, Counter.MISSES].tolist() == misses
    assert {s: int(made.tables.touched[s]) for s in last_use} == last_use
    touched = made.tables.touched.clone()
    keys, tables = batch(device, 70, seed=9)
    made.look_up(keys, tables, progress, use=LineUse(None))
    assert torch.equal(touched, made.tables.touched)
    num_ids = int((tables >= 0).sum())
    assert int(counters[:, [Counter.HITS, Counter.MISSES]].sum()) == sum(hits + misses) + num_ids


def held_ids(made: Cache) -> tuple[Tensor, Tensor]:
    device = made.lines.device
    keys = torch.tensor([key for key, _ in made.held], device=device)
    return keys, torch.tensor([t for _, t in made.held], dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn])
def test_copies_are_read_in_place_of_their_lines(dtype: torch.dtype, device: torch.device) -> None:
    made = cache(dtype, 6, device)
    others = cache(dtype, 6, device, seed=5).lines
    copy_of_line = torch.full((len(made.lines),), -1, dtype=torch.int32, device=device)
    copied = torch.arange(0, len(made.lines), 3, device=device)
    copy_of_line[copied] = torch.arange(len(copied), dtype=torch.int32, device=device).flip(0)
    copies = LineCopies(others[copied.flip(0)], copy_of_line)
    keys, tables = batch(device, 90)
    found = made.look_up(keys, tables, copies=copies)
    made.lines = torch.where((copy_of_line >= 0)[:, None], others, made.lines)
    assert_same_numbers(found.rows, made.expected(found.slots))


def test_compiles_with_any_number_of_ids(device: torch.device) -> None:
    made = cache(torch.float32, 4, device)

    def look_up(keys: Tensor, tables: Tensor) -> FoundLines:
        return made.look_up(keys, tables, progress)

    progress = made.progress
    compiled = compiled_once(look_up)
    for num_ids in (20, 30):
        keys, tables = batch(device, num_ids)
        for one, other in zip(compiled(keys, tables), look_up(keys, tables), strict=True):
            assert torch.equal(one, other)


LONG = torch.int64
NARROW = torch.zeros(2, 16, dtype=torch.uint8)
ERRORS = [
    (
        TypeError,
        r"^line_dtype must be one of float32, .*torch.int16$",
        ("line_dtype", torch.int16),
    ),
    (ValueError, r"^dim must be at least 1, got 0$", ("dim", 0)),
    (ValueError, r"^lines must have 20 bytes a row for 5 elements of float32, got 16$", ("dim", 5)),
    (TypeError, r"^lines must be uint8, got float32", ("lines", torch.zeros(400, 4))),
    (ValueError, r"^lines must have a row for each of \d+ slots, got 2$", ("lines", NARROW)),
    (ValueError, r"^copies and copy_of_line must both be given", ("copies", NARROW)),
    (ValueError, r"^epoch must be given where touched is, got None$", ("epoch", None)),
    (ValueError, r"^counters must be given where epoch is, got None$", ("counters", None)),
    (ValueError, r"^progress must ", ("progress", torch.zeros(2, dtype=LONG))),
    (TypeError, r"^touched must be int64, got int32", ("touched", torch.zeros(400).int())),
    (ValueError, r"^tables must hold 6 elements", ("tables", torch.zeros(3).int())),
]


@pytest.mark.parametrize(("error", "message", "change"), ERRORS)
def test_refuses_what_does_not_fit(
    error: type[Exception], message: str, change: tuple[str, object], device: torch.device
) -> None:
    made = cache(torch.float32, 4, device)
    keys, tables = batch(device, 6)
    one = torch.ones(1, dtype=torch.int64, device=device)
    arguments: dict[str, object] = {
        "keys": keys,
        "tables": tables,
        "digests": made.tables.digests,
        "slot_keys": made.tables.keys,
        "geometry": made.tables.geometry,
        "lines": made.lines,
        "line_dtype": torch.float32,
        "dim": 4,
        "reads": True,
        "copies": None,
        "copy_of_line": None,
        "touched": made.tables.touched,
        "epoch": one,
        "counters": made.tables.counters,
        "progress": made.progress,
    }
    name, value = change
    arguments[name] = value.to(device) if isinstance(value, Tensor) else value
    with pytest.raises(error, match=message):
        torch.ops.torchembed.cached_lookup(**arguments)
