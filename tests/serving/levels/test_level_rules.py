"""Levels that take a part of tables as these are loaded, and what they are given afterwards."""

import re
from pathlib import Path

import pytest
import torch

from torchembed.serving.levels import LevelRules, LoadedPart, RowLevels, ServedTable
from torchembed.stores import MemoryStore, RocksDBStore, RowStore

TABLE = ServedTable(name="t", dim=2)
KEYS = torch.arange(100) * 7 - 300
LINES = torch.arange(100.0).repeat_interleave(2).view(100, 2).view(torch.uint8)


def keys_of(store: RowStore) -> list[int]:
    return [k for chunk in store.table("t", 8).chunks(1000) for k in chunk.keys.tolist()]


def load(levels: RowLevels, num_at_once: int) -> None:
    begin = 0
    for keys, lines in zip(KEYS.split(num_at_once), LINES.split(num_at_once), strict=True):
        levels.load_lines("t", keys, lines, LoadedPart(begin, len(KEYS)))
        begin += len(keys)


@pytest.mark.parametrize("num_at_once", [1, 7, 100])
@pytest.mark.parametrize("share", [0.0, 0.005, 0.29, 1.0])
def test_the_first_rows_are_loaded_and_earlier_ones_of_the_others_deleted(
    share: float, num_at_once: int
) -> None:
    with MemoryStore() as upper, MemoryStore() as lower:
        rules = [LevelRules(initial_share=share, is_own=True), LevelRules()]
        levels = RowLevels([upper, lower], [TABLE], names=["upper", "lower"], rules=rules)
        upper.table("t", 8).write(KEYS, torch.zeros_like(LINES))
        load(levels, num_at_once)
        # 100 * 0.29 is 28.999999999999996 in floating point.
        assert keys_of(upper) == KEYS[: round(100 * share)].tolist()
        assert keys_of(lower) == KEYS.tolist()
        read = levels.read("t", KEYS)
        assert read.is_found.all() and torch.equal(read.lines, LINES)


def test_rows_from_elsewhere_are_left_alone_where_nothing_is_loaded() -> None:
    with MemoryStore() as shared, MemoryStore() as lower:
        rules = [LevelRules(initial_share=0.0), LevelRules()]
        levels = RowLevels([shared, lower], [TABLE], names=["shared", "lower"], rules=rules)
        shared.table("t", 8).write(KEYS[:3], LINES[:3])
        load(levels, 100)
        assert keys_of(shared) == KEYS[:3].tolist()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_rows_that_the_lowest_level_has_are_copied_to_those_of_this_process(
    tmp_path: Path, share: float
) -> None:
    with MemoryStore() as own, MemoryStore() as shared, RocksDBStore(tmp_path / "rows") as disk:
        disk.table("t", 8).write(KEYS, LINES)
        rules = [LevelRules(initial_share=share, is_own=True), LevelRules(), LevelRules()]
        levels = RowLevels([own, shared, disk], [TABLE], names=["o", "s", "d"], rules=rules)
        levels.fill("t")
        assert keys_of(own) == KEYS[: round(100 * share)].tolist()
        assert keys_of(shared) == []


def test_missed_rows_are_inserted_where_the_rules_say_so() -> None:
    with MemoryStore() as first, MemoryStore() as second, MemoryStore() as lowest:
        rules = [LevelRules(inserts_missed_rows=False), LevelRules(), LevelRules()]
        levels = RowLevels([first, second, lowest], [TABLE], names=["1", "2", "3"], rules=rules)
        lowest.table("t", 8).write(KEYS, LINES)
        assert levels.read("t", KEYS[:10]).is_found.all()
        assert (keys_of(first), keys_of(second)) == ([], KEYS[:10].tolist())
        levels.write("t", KEYS[:3], torch.ones(3, 2))
        assert keys_of(first) == KEYS[:3].tolist()


def test_writes_are_divided_into_batches() -> None:
    sizes: list[int] = []

    class Noting(MemoryStore):
        def table(self, name: str, line_bytes: int):
            table = super().table(name, line_bytes)
            write = table.write
            table.write = lambda keys, lines: (sizes.append(len(keys)), write(keys, lines))[1]  # type: ignore[method-assign]
            return table

    with Noting() as store:
        levels = RowLevels([store], [TABLE], rules=[LevelRules(max_batch_rows=30)])
        levels.write_lines("t", KEYS, LINES)
        assert sizes == [30, 30, 30, 10] and keys_of(store) == KEYS.tolist()


def test_rules_that_cannot_be_are_named() -> None:
    for fields, message in (
        ({"initial_share": 1.5}, "initial_share must be from 0 to 1, got 1.5"),
        ({"max_batch_rows": 0}, "max_batch_rows must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            LevelRules(**fields)
    with (
        MemoryStore() as store,
        pytest.raises(ValueError, match=r"rules must be 1, one for each store, got 2"),
    ):
        RowLevels([store], [TABLE], rules=[LevelRules()] * 2)
