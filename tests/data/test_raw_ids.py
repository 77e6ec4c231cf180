"""Ids as they stand in the data: any 64-bit integer, and stable hashes of texts."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import reading
from torchembed.data import (
    MISSING_ID,
    CriteoText,
    MlperfDays,
    ParquetClicks,
    Portion,
    Split,
    open_clicks,
    text_ids,
)

INT64 = np.iinfo(np.int64)


def fnv1a(text: str) -> int:
    """The hash byte by byte, as a signed integer."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value - (1 << 64) if value >= 1 << 63 else value


@given(texts=st.lists(st.text(max_size=20)))
def test_ids_of_texts_are_their_hashes(texts: list[str]) -> None:
    assert text_ids(texts).tolist() == [fnv1a(text) for text in texts]


def test_ids_of_texts_are_published_values() -> None:
    """The values of http://www.isthe.com/chongo/src/fnv/test_fnv.c."""
    published = {"": 0xCBF29CE484222325, "a": 0xAF63DC4C8601EC8C, "foobar": 0x85944171F73967E8}
    assert text_ids(list(published)).view(np.uint64).tolist() == list(published.values())


def test_ids_of_texts_are_the_same_in_every_process() -> None:
    """Whatever seed Python's own hashes have there."""
    script = "from torchembed.data import text_ids; print(text_ids(['Drama', 'é']).tolist())"
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str([fnv1a("Drama"), fnv1a("é")])


def test_no_two_of_many_texts_share_an_id() -> None:
    texts = [f"{prefix}{number}" for prefix in ("", "user_", "é-") for number in range(50_000)]
    assert len(np.unique(text_ids(texts))) == len(texts)


@pytest.mark.parametrize("world_size", [1, 3])
def test_criteo_ids_are_their_hexadecimal_numbers(tmp_path: Path, world_size: int) -> None:
    pytest.importorskip("polars", reason="Criteo's text is read with polars")
    rows = reading.random_rows(103)
    rows.ids[5] = [0] * 26
    path = tmp_path / "train.txt"
    path.write_text(reading.as_text(rows))
    options: dict[str, Any] = {"batch_size": 8, "table_sizes": 50, "world_size": world_size}
    raw, reduced = (
        reading.samples(
            reading.in_turn(
                [
                    CriteoText(path, rank=rank, raw_ids=raw_ids, **options)
                    for rank in range(world_size)
                ]
            )
        )
        for raw_ids in (True, False)
    )
    expected = [
        [[MISSING_ID if row[column] is None else row[column]] for row in rows.ids]
        for column in range(26)
    ]
    reading.assert_same_samples(raw, reduced._replace(ids=expected))


def test_criteo_rows_go_on_where_they_were_and_bad_ones_are_named(tmp_path: Path) -> None:
    pytest.importorskip("polars", reason="Criteo's text is read with polars")
    rows = reading.random_rows(30)
    text = reading.as_text(rows)
    (tmp_path / "train.txt").write_text(text)
    source = open_clicks(
        tmp_path, batch_size=7, table_sizes=5, split=Split.ALL, raw_ids=True, held_out=0.5
    )
    whole = reading.samples(source)
    rest = reading.samples(source.begin([Portion(1, 7, 2)]))
    assert rest.ids == [column[14:] for column in whole.ids]
    lines = text.splitlines(keepends=True)
    lines[20] = lines[20].replace("\t", "\tx", 1)
    (tmp_path / "train.txt").write_text("".join(lines))
    with pytest.raises(ValueError, match=r"train.txt, row 21, column 2 \(int_0\)"):
        list(source)


def read_parquet(folder: Path, ids: Any) -> tuple[list[int], Sequence[int] | None]:
    """The ids of one column, and the lengths of its lists."""
    pa = pytest.importorskip("pyarrow", reason="Parquet files are read with pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet files are read with pyarrow")
    table = pa.table({"label": [0] * len(ids), "x": [1] * len(ids), "id": ids})
    pq.write_table(table, folder / "log.parquet", row_group_size=3)
    source = ParquetClicks(
        folder, batch_size=4, table_sizes=3, dense=("x",), categorical=("id",), raw_ids=True
    )
    bags = reading.samples(source).ids[0]
    is_jagged = next(iter(source)).sparse.offsets is not None
    return [id_ for bag in bags for id_ in bag], [len(bag) for bag in bags] if is_jagged else None


def test_integers_of_parquet_are_their_own_ids(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet files are read with pyarrow")
    edges = [0, -1, INT64.max, INT64.min, None, 7]
    expected = [MISSING_ID if id_ is None else id_ for id_ in edges]
    assert read_parquet(tmp_path, pa.array(edges, pa.int64())) == (expected, None)
    large = pa.array([2**64 - 1, 2**63, None, 5], pa.uint64())
    assert read_parquet(tmp_path, large) == ([-1, INT64.min, MISSING_ID, 5], None)
    small = pa.array([255, None, 0], pa.uint8())
    assert read_parquet(tmp_path, small) == ([255, MISSING_ID, 0], None)
    bags = pa.array([[1, -2], [], None, [None, 3], [9]], pa.list_(pa.int32()))
    assert read_parquet(tmp_path, bags) == ([1, -2, MISSING_ID, 3, 9], [2, 0, 0, 2, 1])


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "list"])
def test_texts_of_parquet_are_hashed(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet files are read with pyarrow")
    texts = ["x", "é" * 9, None, "x", "", "yy", "x"]
    words = pa.array(texts)
    kinds = {
        "string": words,
        "large_string": words.cast(pa.large_string()),
        "dictionary": words.dictionary_encode(),
        "list": pa.array([texts[:3], [], None, texts[3:]]),
    }
    expected = [MISSING_ID if text is None else fnv1a(text) for text in texts]
    lengths = [3, 0, 0, 4] if kind == "list" else None
    assert read_parquet(tmp_path, kinds[kind]) == (expected, lengths)


@pytest.mark.parametrize("kind", ["binary", "float"])
def test_other_columns_of_parquet_are_named(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet files are read with pyarrow")
    values = {"binary": pa.array([b"x"]), "float": pa.array([0.5], pa.float32())}[kind]
    message = rf"log.parquet: column id must hold integers, texts or lists of them, got {kind}; ca"
    with pytest.raises(ValueError, match=message):
        read_parquet(tmp_path, values)


def write_days(folder: Path, dtypes: Sequence[type], low: int, high: int) -> list[list[int]]:
    """A day of 10 rows for each of ``dtypes``; the first feature has two ids a row, which are
    returned."""
    generator = np.random.default_rng(0)
    ids = []
    for day, dtype in enumerate(dtypes):
        np.save(folder / f"day_{day}_dense.npy", np.zeros((10, 13), np.float32))
        np.save(folder / f"day_{day}_labels.npy", np.ones((10, 1), np.int32))
        first = generator.integers(low, high, (10, 2), dtype, endpoint=True)
        arrays = {str(feature): np.full((10, 1), 5, dtype) for feature in range(1, 26)}
        path = folder / f"day_{day}_sparse_multi_hot.npz"
        np.savez(path, **{"0": first, **arrays})  # type: ignore[arg-type]
        ids += first.tolist()
    return ids


def test_days_hold_any_integers(tmp_path: Path) -> None:
    ids = write_days(tmp_path, [np.int64, np.int64], INT64.min, INT64.max)
    source = MlperfDays(tmp_path, batch_size=7, raw_ids=True)
    assert reading.samples(source).ids[0] == ids
    source = MlperfDays(tmp_path, batch_size=7)
    with pytest.raises(ValueError, match="array 0, row 1: ids must not be negative"):
        list(source)


def test_days_of_64_bits_are_taken_modulo_the_tables(tmp_path: Path) -> None:
    """Also where other days have 32 bits: all batches are of one dtype."""
    ids = write_days(tmp_path, [np.int64, np.int32], 0, (1 << 31) - 1)
    for sizes in (7, 1 << 40):
        source = MlperfDays(tmp_path, batch_size=10, table_sizes=sizes)
        assert reading.samples(source).ids[0] == [[id_ % sizes for id_ in bag] for bag in ids]
        assert len({batch.sparse.values.dtype for batch in source}) == 1
    wide = write_days(tmp_path, [np.int64, np.int32], 0, (1 << 31) - 1)
    source = open_clicks(tmp_path, batch_size=10, table_sizes=3, raw_ids=True)
    assert reading.samples(source).ids[0] == wide
