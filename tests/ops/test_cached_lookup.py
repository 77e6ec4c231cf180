"""Lookups in caches, against the bytes of each line in Python."""

import pytest
import torch
from torch import Tensor

from tests.support.cached_lookups import (
    SHAPES,
    assert_same_numbers,
    batch,
    cache,
    held_ids,
)
from tests.support.tracing import compiled_once
from torchembed.core.cached_lookups import LINE_DTYPES
from torchembed.ops.cached_lookup import FoundLines, LineCopies, LineUse
from torchembed.ops.hash_table import Counter, find_slots, slot_ranges

DIMS = (1, 130)


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
