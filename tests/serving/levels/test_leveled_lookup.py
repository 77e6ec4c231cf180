"""Lookups through cache and levels, against a dict of the rows that were written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchembed.serving.levels import (
    CacheKind,
    EmbeddingCache,
    LeveledLookup,
    RowFormat,
    RowLevels,
    ServedTable,
)
from torchembed.stores import MemoryStore

INT64 = torch.iinfo(torch.int64)
KEYS = [INT64.min, INT64.min + 1, -1, 0, 1, 2, 7, 8, INT64.max - 1, INT64.max]
TABLES = (
    ServedTable(name="m/wide", dim=5, default=0.5),
    ServedTable(name="m/narrow", dim=1, default=-1.0),
    ServedTable(name="m/small", dim=5, row_format=RowFormat.INT8, default=2.0),
)
IDS = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 2)), max_size=12)
CALLS = st.one_of(
    st.tuples(st.just("look_up"), IDS),
    st.tuples(st.just("write"), IDS),
    st.tuples(st.just("delete"), IDS),
    st.tuples(st.just("refresh"), st.just([])),
)


def row(table: int, number: int) -> Tensor:
    """A row that all formats keep as it is: its greatest element is 127 or the whole row."""
    dim = TABLES[table].dim
    values = torch.full((dim,), float(number))
    values[0] = 127.0 if dim > 1 else float(number)
    return values


def batch(ids: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    keys = torch.tensor([key for key, _ in ids], dtype=torch.int64)
    return keys, torch.tensor([table for _, table in ids], dtype=torch.int32)


def padded(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, 5 - len(values)))


@pytest.mark.parametrize("devices", ["cpu", ["cpu", "cpu", "cpu"]], ids=["one", "sharded"])
@pytest.mark.parametrize("num_rows", [3, 300], ids=["smaller than a lookup", "whole"])
@pytest.mark.parametrize("num_device_rows", [None, 6], ids=["dynamic", "uvm"])
@settings(max_examples=15, deadline=None)
@given(calls=st.lists(CALLS, max_size=12))
def test_rows_are_those_of_a_dict(
    devices: str | list[str],
    num_rows: int,
    num_device_rows: int | None,
    calls: list[tuple[str, list[tuple[int, int]]]],
) -> None:
    model: dict[tuple[int, int], Tensor] = {}
    num_ids = num_defaults = 0
    kind = CacheKind.DYNAMIC if num_device_rows is None else CacheKind.UVM
    cache = EmbeddingCache(
        TABLES, devices, num_rows=num_rows, kind=kind, num_device_rows=num_device_rows
    )
    with MemoryStore() as store:
        levels = RowLevels([store], TABLES)
        with LeveledLookup(cache, levels, hit_rate_threshold=1.5) as lookup:
            for number, (call, ids) in enumerate(calls):
                if call == "look_up":
                    found = lookup.look_up(*batch(ids))
                    num_ids += len(ids)
                    lacking = [key not in model for key in ids]
                    num_defaults += sum(lacking)
                    assert found.is_default.tolist() == lacking
                    for key, values in zip(ids, found.rows, strict=True):
                        default = torch.full((TABLES[key[1]].dim,), TABLES[key[1]].default)
                        torch.testing.assert_close(values, padded(model.get(key, default)))
                elif call == "refresh":
                    lookup.refresh(0.5)
                else:
                    for place, table in enumerate(TABLES):
                        keys = sorted({key for key, of in ids if of == place})
                        chosen = torch.tensor(keys, dtype=torch.int64)
                        none = chosen[:0], torch.empty(0, table.dim)
                        if call == "delete":
                            lookup.apply_rows(table.name, *none, chosen)
                            for key in keys:
                                model.pop((key, place), None)
                            continue
                        rows = row(place, number).expand(len(keys), -1)
                        lookup.apply_rows(table.name, chosen, rows)
                        model |= {(key, place): rows[0] for key in keys}
            counts = lookup.statistics()
    assert counts.num_requested_ids == num_ids
    assert counts.num_default_ids == num_defaults
    hits = sum(table.num_hits for table in counts.tables.values())
    assert hits + counts.num_missed_ids == num_ids


@pytest.mark.parametrize(
    ("threshold", "cached", "is_behind"),
    [(0.5, 2, True), (0.75, 2, False), (0.75, 3, True), (1.0, 3, False), (1.5, 0, False)],
)
def test_lookups_that_reach_the_threshold_wait_for_nothing(
    threshold: float, cached: int, is_behind: bool
) -> None:
    table = ServedTable(name="m/t", dim=2, default=9.0)
    keys, rows = torch.arange(4), torch.arange(8.0).view(4, 2)
    tables = torch.zeros(4, dtype=torch.int32)
    cache = EmbeddingCache([table], num_rows=300)
    with MemoryStore() as store:
        levels = RowLevels([store], [table])
        levels.write(table.name, keys, rows)
        cache.insert(0, keys[:cached], rows[:cached].view(torch.uint8))
        with LeveledLookup(cache, levels, hit_rate_threshold=threshold) as lookup:
            found = lookup.look_up(keys, tables)
            is_default = (keys >= cached) & is_behind
            assert torch.equal(found.is_default, is_default)
            assert torch.equal(found.rows, torch.where(is_default[:, None], 9.0, rows))
            assert lookup.statistics().num_default_ids == int(is_default.sum())
            lookup.wait_for_insertions()
            assert torch.equal(lookup.look_up(keys, tables).rows, rows)


def test_what_the_cache_alone_misses_is_a_tensor() -> None:
    cache = EmbeddingCache(TABLES, num_rows=300)
    line = TABLES[1].row_format.encode(torch.tensor([[3.0]]))
    cache.insert(1, torch.tensor([-1]), line)
    keys = torch.tensor([-1, -1, 4, 4])
    found = cache.look_up(keys, torch.tensor([1, 0, 2, -1], dtype=torch.int32))
    assert found.is_missing.tolist() == [False, True, True, False]
    assert found.num_missing.tolist() == [2]
    assert found.rows.tolist() == [[3.0, 0, 0, 0, 0], [0.5] * 5, [2.0] * 5, [0.0] * 5]


def test_deletions_that_are_refused_leave_the_rows() -> None:
    tables = [ServedTable(name="t", dim=2)]
    with MemoryStore() as store:
        levels = RowLevels([store], tables)
        with LeveledLookup(EmbeddingCache(tables, num_rows=4), levels) as lookup:
            keys, rows = torch.tensor([1, 2]), torch.ones(2, 2)
            with pytest.raises(TypeError, match="deleted_keys must be int64, got int32"):
                lookup.apply_rows("t", keys, rows, torch.tensor([1], dtype=torch.int32))
            with pytest.raises(ValueError, match=r"deleted_keys must have 1 dimension\(s\)"):
                lookup.apply_rows("t", keys, rows, torch.tensor([[1]]))
            assert levels.num_rows("t") == 0
