"""Caches of rows: their kinds, and what they refuse."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.types import Pooling
from torchembed.serving.levels import (
    CacheKind,
    EmbeddingCache,
    LeveledLookup,
    RowFormat,
    RowLevels,
    ServedFeature,
    ServedTable,
)
from torchembed.serving.levels.level_rules import LoadedPart
from torchembed.stores import MemoryStore

TABLE = ServedTable(name="m/item", dim=4, row_format=RowFormat.FP32, default=0.5)
OTHER = ServedTable(name="m/user", dim=3, row_format=RowFormat.INT8, default=-1.0)
NUM_ROWS = 5000
"""More than a block of slots has."""
PART = LoadedPart(0, NUM_ROWS)


def rows_of(table: ServedTable, keys: Tensor) -> Tensor:
    """A row for each key, which all formats keep as it is."""
    rows = torch.full((len(keys), table.dim), 127.0)
    rows[:, 1:] = (keys % 101)[:, None].float()
    return rows


def in_table(place: int, keys: Tensor) -> Tensor:
    return torch.full(keys.shape, place, dtype=torch.int32)


@pytest.fixture
def keys() -> Tensor:
    return torch.randint(-(2**62), 2**62, (NUM_ROWS,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["cpu", ["cpu", "cpu", "cpu"]], ids=["one", "sharded"])
def static(request: pytest.FixtureRequest, keys: Tensor) -> Iterator[LeveledLookup]:
    """A lookup in a static cache of both tables, with all their rows."""
    num_rows = {TABLE.name: NUM_ROWS, OTHER.name: NUM_ROWS}
    tables = [TABLE, OTHER]
    cache = EmbeddingCache(tables, request.param, num_rows=num_rows, kind=CacheKind.STATIC)
    with LeveledLookup(cache, None) as lookup:
        for table in tables:
            for begin in range(0, NUM_ROWS, 2000):
                some, part = keys[begin : begin + 2000], LoadedPart(begin, NUM_ROWS)
                lookup.load_rows(table.name, some, rows_of(table, some), part)
        yield lookup


def test_a_static_cache_has_all_rows_and_defaults_for_others(
    static: LeveledLookup, keys: Tensor
) -> None:
    for place, table in enumerate((TABLE, OTHER)):
        asked = torch.cat([keys, torch.tensor([2**63 - 1, -(2**63)])])
        found = static.look_up(asked, in_table(place, asked))
        assert found.is_default.nonzero().flatten().tolist() == [NUM_ROWS, NUM_ROWS + 1]
        assert torch.equal(found.rows[:NUM_ROWS, : table.dim], rows_of(table, keys))
        assert (found.rows[NUM_ROWS:, : table.dim] == table.default).all()
    counts = static.statistics()
    assert (counts.num_missed_ids, counts.num_default_ids, counts.levels) == (4, 4, ())
    assert {t.num_rows for t in counts.tables.values()} == {NUM_ROWS}
    assert {t.num_evictions for t in counts.tables.values()} == {0}


def test_a_static_cache_takes_no_updates_and_changes_nothing(
    static: LeveledLookup, keys: Tensor
) -> None:
    rows = torch.zeros(NUM_ROWS, TABLE.dim)
    with pytest.raises(ValueError, match=r"^table 'm/item' must be in a cache that takes updates"):
        static.apply_rows(TABLE.name, keys, rows, keys[:1])
    with pytest.raises(ValueError, match=r"^a static cache is not refreshed"):
        static.refresh(1.0)
    static.load_rows(TABLE.name, keys[:9], rows_of(TABLE, keys[:9]), PART)  # the same ones again
    with pytest.raises(ValueError, match=r"^rows of table 'm/item' must be those that were loaded"):
        static.load_rows(TABLE.name, keys[:9], rows[:9], PART)
    found = static.look_up(keys, in_table(0, keys))
    assert torch.equal(found.rows, rows_of(TABLE, keys)) and not found.is_default.any()


def test_a_static_cache_refuses_more_rows_than_it_has_room_for() -> None:
    cache = EmbeddingCache([TABLE], num_rows=40, kind=CacheKind.STATIC)
    with LeveledLookup(cache, None) as lookup:
        keys = torch.arange(60)
        with pytest.raises(
            ValueError,
            match=r"^the cache must have room for all rows of table 'm/item', got \d+ too",
        ):
            lookup.load_rows(TABLE.name, keys, rows_of(TABLE, keys), PART)


@pytest.mark.parametrize("row_format", RowFormat)
def test_rows_in_memory_of_the_host_are_read_beside_copies(row_format: RowFormat) -> None:
    """Copies of some rows change nothing, wherever a row is when it is updated or deleted."""
    table = ServedTable(name="m/t", dim=3, row_format=row_format, default=9.0)
    keys = torch.arange(300)

    def as_kept(rows: Tensor) -> Tensor:
        return row_format.decode(row_format.encode(rows), table.dim)

    cache = EmbeddingCache([table], num_rows=300, kind=CacheKind.UVM, num_device_rows=8)
    with MemoryStore() as store, LeveledLookup(cache, RowLevels([store], [table])) as lookup:
        lookup.apply_rows(table.name, keys, rows_of(table, keys))
        features = SparseFeatures(keys=("f",), values=keys, batch_size=100, hotness=(3,))
        served = [ServedFeature(name="f", table=table.name, pooling=Pooling.SUM)]
        expected = as_kept(rows_of(table, keys))
        for number in range(24):
            some = keys[number % 7 :: 50]
            found = lookup.look_up(some, in_table(0, some))
            assert torch.equal(found.rows, expected[some])
            lookup.wait_for_insertions()
            changed = keys[number::60]
            rows = torch.full((len(changed), table.dim), float(number))
            expected[changed] = as_kept(rows)
            lookup.apply_rows(table.name, changed, rows)
            sums = lookup.pooled(features, served).vectors["f"]
            assert torch.equal(sums, expected.view(100, 3, 3).sum(1))
        lookup.apply_rows(table.name, keys[:0], expected[:0], keys[:5])
        found = lookup.look_up(keys, in_table(0, keys))
        assert found.is_default.nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
        assert torch.equal(found.rows[5:], expected[5:])
        assert (found.rows[:5] == 9.0).all()
        assert lookup.statistics().num_failed_insertions == 0


def test_a_cache_of_whole_tables_takes_all_rows_of_the_lowest_level() -> None:
    keys = torch.arange(200)
    with MemoryStore() as store:
        levels = RowLevels([store], [TABLE])
        levels.write(TABLE.name, keys, rows_of(TABLE, keys))
        cache = EmbeddingCache([TABLE], num_rows=200, kind=CacheKind.UVM, num_device_rows=4)
        with LeveledLookup(cache, levels) as lookup:
            lookup.read_all(TABLE.name)
            assert torch.equal(lookup.look_up(keys, in_table(0, keys)).rows, rows_of(TABLE, keys))
            assert lookup.statistics().num_missed_ids == 0


def test_caches_and_levels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"room for at least 1 row of table 'm/item', got 0"):
        EmbeddingCache([TABLE], num_rows={"m/item": 0})
    with pytest.raises(ValueError, match=r"^give exactly one of num_rows and num_bytes, got None"):
        EmbeddingCache([TABLE])
    for kind, number in ((CacheKind.UVM, None), (CacheKind.DYNAMIC, 3), (CacheKind.STATIC, 3)):
        with pytest.raises(ValueError, match=r"^num_device_rows must be given for a cache of"):
            EmbeddingCache([TABLE], num_rows=10, kind=kind, num_device_rows=number)
    with pytest.raises(ValueError, match=r"^num_device_rows must be at least 1, got 0"):
        EmbeddingCache([TABLE], num_rows=10, kind=CacheKind.UVM, num_device_rows=0)
    with MemoryStore() as store:
        static = EmbeddingCache([TABLE], num_rows=10, kind=CacheKind.STATIC)
        with pytest.raises(ValueError, match=r"^levels must be None for a static cache"):
            LeveledLookup(static, RowLevels([store], [TABLE]))
        with pytest.raises(ValueError, match=r"^levels must be None for a static cache"):
            LeveledLookup(EmbeddingCache([TABLE], num_rows=10), None)
