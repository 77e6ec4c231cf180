"""Lookups that are captured once and replayed, against those of the cache itself."""

import threading

import pytest
import torch
from torch import Tensor

from torchembed.serving.levels import (
    EmbeddingCache,
    LeveledLookup,
    RowFormat,
    RowLevels,
    ServedTable,
)
from torchembed.serving.levels.captured_lookups import CapturedLookups
from torchembed.stores import MemoryStore

TABLES = (
    ServedTable(name="wide", dim=5, default=0.5),
    ServedTable(name="narrow", dim=2, default=-1.0),
    ServedTable(name="small", dim=5, row_format=RowFormat.INT8, default=2.0),
)
NUM_CACHED = 40


def filled_cache(device: str) -> EmbeddingCache:
    """A cache of keys 0 to 39 of each table."""
    cache = EmbeddingCache(TABLES, device, num_rows=300)
    keys = torch.arange(NUM_CACHED)
    for place, table in enumerate(TABLES):
        cache.insert(place, keys, table.row_format.encode(rows_of(keys, place, table.dim)))
    return cache


def rows_of(keys: Tensor, place: int, dim: int) -> Tensor:
    """Rows that all formats keep as they are."""
    rows = ((keys + place) % 100).float()[:, None].repeat(1, dim)
    rows[:, 0] = 127.0
    return rows


def asked(num_ids: int, num_keys: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_ids)
    keys = torch.randint(num_keys, (num_ids,), generator=generator)
    places = torch.randint(-1, len(TABLES), (num_ids,), generator=generator)
    return keys.to(device), places.int().to(device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_captured_lookups_are_those_of_the_cache(device: str) -> None:
    cache, plain = filled_cache(device), filled_cache(device)
    lookups = CapturedLookups(cache)
    # Fewer ids after more, of one size and of two; with all of them cached, and without.
    for num_ids in (300, 257, 512, 1, 256, 8192, 300):
        for num_keys in (NUM_CACHED, 2 * NUM_CACHED):
            keys, places = asked(num_ids, num_keys)
            found = lookups.look_up(keys, places)
            expected = plain.look_up(keys.to(device), places.to(device))
            assert found is not None
            assert torch.equal(found.rows, expected.rows)
            assert torch.equal(found.is_missing, expected.is_missing)
            assert [found.num_missing] == expected.num_missing.tolist()
            assert bool(found.num_missing) == (num_keys > NUM_CACHED and num_ids > 1)
    assert cache.counts() == plain.counts()


def test_lookups_of_none_and_of_many_ids_are_not_captured() -> None:
    lookups = CapturedLookups(filled_cache("cpu"))
    assert lookups.look_up(*asked(0, 1)) is None
    assert lookups.look_up(*asked(8193, 1)) is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_answers_are_kept_while_others_are_looked_up_and_see_what_was_written(device: str) -> None:
    cache = filled_cache(device)
    lookups = CapturedLookups(cache)
    keys, places = torch.tensor([3, 4]), torch.tensor([0, 0], dtype=torch.int32)
    before = lookups.look_up(keys, places)
    changed = rows_of(keys, 7, 5)
    cache.update(0, keys, TABLES[0].row_format.encode(changed))
    after = lookups.look_up(keys, places)
    assert before is not None and after is not None
    assert torch.equal(before.rows.cpu(), rows_of(keys, 0, 5))
    assert torch.equal(after.rows.cpu(), changed)


@pytest.mark.gpu
def test_threads_look_up_while_rows_change_and_are_missed() -> None:
    cache, torn = filled_cache("cuda"), list[Tensor]()
    with MemoryStore() as store:
        levels = RowLevels([store], TABLES)
        with LeveledLookup(cache, levels, hit_rate_threshold=2.0) as lookup:
            keys = torch.arange(2 * NUM_CACHED)
            places = torch.zeros(len(keys), dtype=torch.int32)
            lookup.apply_rows("wide", keys, torch.zeros(len(keys), 5))

            def ask(seed: int) -> None:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for _ in range(100):
                        order = torch.randperm(len(keys))[: 1 + seed * 17]
                        rows = lookup.look_up(keys[order].cuda(), places[order].cuda()).rows
                        if not (rows == rows[:, :1]).all():
                            torn.append(rows)

            threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
            for thread in threads:
                thread.start()
            for number in range(1, 50):
                lookup.apply_rows("wide", keys, torch.full((len(keys), 5), float(number)))
            for thread in threads:
                thread.join()
            assert not torn
            assert (lookup.look_up(keys, places).rows == 49.0).all()
            assert lookup.statistics().num_default_ids == 0
