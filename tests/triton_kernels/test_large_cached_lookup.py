"""Lookups of many ids by several kernels, against the one launch that answers few."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.cached_lookups import Cache, assert_same_numbers, batch, cache
from tests.support.tolerance import assert_same_bits
from torchembed.core.cached_lookups import LINE_DTYPES
from torchembed.ops.cached_lookup import FoundLines, LineCopies, LineUse
from torchembed.ops.hash_table import HashTables
from torchembed.triton_kernels import cached_lookup, large_cached_lookup


class Lookup(NamedTuple):
    """What a lookup gives, and what it leaves behind."""

    found: FoundLines
    touched: Tensor
    counters: Tensor
    epoch: Tensor
    progress: Tensor


def few_in_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small lookups take several programs of each kind, several times around, and regions."""
    monkeypatch.setattr(cached_lookup, "_LARGE_IDS", 1)
    monkeypatch.setattr(large_cached_lookup, "_NOTED_BLOCK", 16)
    monkeypatch.setattr(large_cached_lookup, "_NOTING_PROGRAMS", 3)
    monkeypatch.setattr(large_cached_lookup, "_REGION_BYTES", 1 << 10)
    monkeypatch.setattr(large_cached_lookup, "_FAR_PROGRAMS", 2)
    monkeypatch.setattr(large_cached_lookup, "_NUM_ACCESSES", 1)


def copies_of(made: Cache, copied: str) -> tuple[LineCopies | None, Tensor]:
    """Copies of none, some or all lines, of other random bits, and what is then read of each line.
    Where there is no room for copies, lines are not told apart."""
    if copied == "no room":
        return None, made.lines
    num_lines, device = len(made.lines), made.lines.device
    others = cache(made.dtype, made.dim, device, seed=5).lines
    which = torch.arange(num_lines, device=device)
    # Lines of a slot and default lines are among both of them.
    is_copied = {"none": which < 0, "some": which % 3 != 1, "all": which >= 0}[copied]
    copy_of_line = torch.where(is_copied, num_lines - 1 - which, -1).int()
    read = torch.where(is_copied[:, None], others, made.lines)
    return LineCopies(others.flip(0), copy_of_line), read


def look_up(
    made: Cache, keys: Tensor, tables: Tensor, copies: LineCopies | None, reads: bool
) -> Lookup:
    """A lookup in a copy of the tables of ``made``."""
    tables_of = made.tables._replace(
        touched=made.tables.touched.clone(), counters=made.tables.counters.clone()
    )
    same = Cache(tables_of, made.lines, made.dtype, made.dim, made.held)
    epoch, progress = torch.full_like(keys[:1], 6), torch.zeros_like(keys[:1])
    found = same.look_up(keys, tables, progress, copies=copies, use=LineUse(epoch), reads=reads)
    return Lookup(found, tables_of.touched, tables_of.counters, epoch, progress)


def assert_same_lookup(actual: Lookup, expected: Lookup) -> None:
    for one, other in zip(actual.found, expected.found, strict=True):
        assert_same_bits(one, other)
    for one, other in zip(actual[1:], expected[1:], strict=True):
        assert torch.equal(one, other)
    assert actual.progress.tolist() == [0]


@pytest.mark.parametrize(
    ("copied", "dim"), [("no room", 130), ("none", 1), ("some", 130), ("all", 7)]
)
@pytest.mark.parametrize("dtype", LINE_DTYPES)
def test_many_ids_give_what_few_do(
    dtype: torch.dtype, dim: int, copied: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cache(dtype, dim, device)
    copies, made_read = copies_of(made, copied)
    keys, tables = batch(device, 107)
    expected = look_up(made, keys, tables, copies, reads=True)
    few_in_each_block(monkeypatch)
    actual = look_up(made, keys, tables, copies, reads=True)
    assert_same_lookup(actual, expected)
    read = Cache(made.tables, made_read, dtype, dim, made.held)
    assert_same_numbers(actual.found.rows, read.expected(actual.found.slots))
    only_found = look_up(made, keys, tables, copies, reads=False)
    assert only_found.found.rows.shape == (0, dim)
    rows = only_found.found._replace(rows=expected.found.rows)
    assert_same_lookup(only_found._replace(found=rows), expected)


@pytest.mark.parametrize("num_ids", [1, 16, 33])
@pytest.mark.parametrize("lacking", [False, True])
def test_lookups_of_one_kind_of_ids(
    lacking: bool, num_ids: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ids without a row, and no ids at all; and rows of more than one block of columns."""
    made = cache(torch.float32, 600, device)
    copies, _ = copies_of(made, "some")
    keys = torch.full((num_ids,), 999_999, device=device)
    tables = torch.full((num_ids,), 1 if lacking else -1, dtype=torch.int32, device=device)
    expected = look_up(made, keys, tables, copies, reads=True)
    few_in_each_block(monkeypatch)
    actual = look_up(made, keys, tables, copies, reads=True)
    assert_same_lookup(actual, expected)
    assert actual.found.num_missing.tolist() == [num_ids * lacking]


def test_lookups_without_tables(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    few_in_each_block(monkeypatch)
    made = cache(torch.float32, 3, device)
    no_tables = HashTables(*[None if part is None else part[:0] for part in made.tables])  # type: ignore[arg-type]
    without = Cache(no_tables, made.lines[:0], made.dtype, made.dim, [])
    keys = torch.arange(20, device=device)
    no_ids = torch.full_like(keys, -1, dtype=torch.int32)
    copies = LineCopies(made.lines[:1], no_ids[:0])
    found = look_up(without, keys, no_ids, copies, reads=True).found
    assert (found.rows == 0).all() and (found.slots == -1).all()
    assert int(found.num_missing) == 0


def test_lines_are_read_region_by_region(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_in_each_block(monkeypatch)
    read_in_order: list[Tensor] = []
    kernel = large_cached_lookup._large_cached_lookup_read_kernel

    class Seen:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def launch(*arguments: object, **sizes: object) -> None:
                slots, far_ids, num_far = arguments[5:8]
                assert isinstance(slots, Tensor)
                assert isinstance(far_ids, Tensor) and isinstance(num_far, Tensor)
                read_in_order.append(slots[far_ids[: int(num_far)].long()])
                kernel[grid](*arguments, **sizes)

            return launch

    monkeypatch.setattr(large_cached_lookup, "_large_cached_lookup_read_kernel", Seen())
    made = cache(torch.float32, 16, device)
    copies, _ = copies_of(made, "none")
    keys, tables = batch(device, 200)
    found = look_up(made, keys, tables, copies, reads=True).found
    (lines,) = read_in_order
    bits = large_cached_lookup._region_bits(made.lines)
    regions = lines >> bits
    assert bits == 4 and len(regions.unique()) > 8
    assert torch.equal(regions, regions.sort().values)
    assert copies is not None
    is_far = (found.slots >= 0) & (copies.copy_of_line[found.slots] < 0)
    assert torch.equal(lines.sort().values, found.slots[is_far].sort().values)


@pytest.mark.parametrize(
    ("num_lines", "num_bytes", "bits"),
    [(1, 4, 23), (4_500_000, 512, 16), (4_500_000, 130, 17), (1 << 30, 512, 20), (9, 1 << 26, 0)],
)
def test_regions_are_as_large_as_addresses_are_translated_in_and_not_too_many(
    num_lines: int, num_bytes: int, bits: int
) -> None:
    lines = torch.empty(num_lines, num_bytes, dtype=torch.uint8, device="meta")
    assert large_cached_lookup._region_bits(lines) == bits


@pytest.mark.gpu
def test_many_ids_are_looked_up_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    made = cache(torch.int8, 70, device)
    copies, _ = copies_of(made, "some")
    batches = [batch(device, 107, seed=seed) for seed in range(3)]
    expected = [look_up(made, *ids, copies, reads=True) for ids in batches]
    few_in_each_block(monkeypatch)
    keys, tables = batches[0][0].clone(), batches[0][1].clone()
    look_up(made, keys, tables, copies, reads=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = look_up(made, keys, tables, copies, reads=True)
    for (some_keys, some_tables), once in zip(batches, expected, strict=True):
        keys.copy_(some_keys)
        tables.copy_(some_tables)
        graph.replay()
        assert_same_lookup(captured, once)
