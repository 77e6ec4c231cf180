"""Parquet: types, lists, missing values, row groups over ranks, and errors."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import reading
from tests.support.tolerance import relative_error
from torchembed.data import BatchSource, ParquetClicks, Split

pa = pytest.importorskip("pyarrow", reason="Parquet files are read with pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="Parquet files are read with pyarrow")

NAMES: dict[str, Any] = {
    "label": "click",
    "dense": ("age", "price"),
    "categorical": ("user", "genres"),
}
SIZES = (11, 7)


def columns(num_rows: int, seed: int = 0) -> dict[str, list[Any]]:
    random = np.random.default_rng(seed)
    genres = [random.integers(-50, 50, random.integers(0, 4)).tolist() for _ in range(num_rows)]
    return {
        "click": random.integers(0, 2, num_rows).tolist(),
        "age": random.integers(-1, 90, num_rows).tolist(),
        "price": random.random(num_rows).astype(np.float32).tolist(),
        "user": random.integers(0, 1 << 40, num_rows).tolist(),
        "genres": [None if row % 7 == 3 else bag for row, bag in enumerate(genres)],
        "unused": ["x"] * num_rows,
    }


def expected_samples(table: dict[str, list[Any]]) -> reading.Samples:
    ages = np.log1p(np.maximum(np.array(table["age"]), 0).astype(np.float32))
    dense = np.stack([ages, np.array(table["price"], np.float32)], axis=1)
    users = [[id_ % SIZES[0]] for id_ in table["user"]]
    genres = [[id_ % SIZES[1] for id_ in bag or ()] for bag in table["genres"]]
    labels = torch.tensor(table["click"], dtype=torch.float32)
    return reading.Samples(torch.from_numpy(dense), [users, genres], labels)


def write(path: Path, table: dict[str, list[Any]], group_rows: int = 10) -> Path:
    pq.write_table(pa.table(table), path, row_group_size=group_rows)
    return path


def part(got: reading.Samples, start: int, stop: int) -> reading.Samples:
    ids = [column[start:stop] for column in got.ids]
    return reading.Samples(got.dense[start:stop], ids, got.labels[start:stop])


def one_after_another(ranks: list[BatchSource]) -> reading.Samples:
    for source in ranks:
        assert len(source) == len(list(source))
    return reading.samples(batch for source in ranks for batch in source)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("group_rows", [10, 1000])
def test_every_row_arrives_once(tmp_path: Path, world_size: int, group_rows: int) -> None:
    table = columns(103)
    for number, (start, stop) in enumerate([(0, 40), (40, 41), (41, 103)]):
        some = {name: column[start:stop] for name, column in table.items()}
        write(tmp_path / f"part-{number}.parquet", some, group_rows)
    ranks: list[BatchSource] = [
        ParquetClicks(
            tmp_path, batch_size=8, table_sizes=SIZES, rank=rank, world_size=world_size, **NAMES
        )
        for rank in range(world_size)
    ]
    reading.assert_same_samples(one_after_another(ranks), expected_samples(table))
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
    assert {batch.sparse.batch_size for batch in list(ranks[0])[:-1]} == {8}


def test_ranks_without_rows_have_no_batches(tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", columns(2))
    ranks = [
        ParquetClicks(path, batch_size=8, table_sizes=SIZES, rank=rank, world_size=4, **NAMES)
        for rank in range(4)
    ]
    assert [len(rank) for rank in ranks] == [0, 1, 0, 1]
    assert [len(list(rank)) for rank in ranks] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("split", "start", "stop"),
    [
        (Split.TRAIN, 0, 80),
        (Split.HELD_OUT, 80, 101),
        (Split.VALIDATION, 80, 91),
        (Split.TEST, 91, 101),
        (Split.ALL, 0, 101),
    ],
)
def test_splits_divide_the_rows(tmp_path: Path, split: Split, start: int, stop: int) -> None:
    table = columns(101)
    path = write(tmp_path / "log.parquet", table)
    ranks: list[BatchSource] = [
        ParquetClicks(
            path,
            batch_size=4,
            table_sizes=SIZES,
            split=split,
            held_out=0.21,
            rank=rank,
            world_size=2,
            **NAMES,
        )
        for rank in range(2)
    ]
    expected = part(expected_samples(table), start, stop)
    reading.assert_same_samples(one_after_another(ranks), expected)


def test_scalar_ids_need_no_offsets(tmp_path: Path) -> None:
    rows = reading.random_rows(20, largest_id=500)
    table = {"label": pa.array([label == 1 for label in rows.labels])}
    for column in range(13):
        table[f"int_{column}"] = pa.array([row[column] for row in rows.counts], pa.int32())
    for column in range(26):
        table[f"cat_{column}"] = pa.array([row[column] for row in rows.ids], pa.uint16())
    write(tmp_path / "log.parquet", table)
    batches = list(ParquetClicks(tmp_path, batch_size=20, table_sizes=100_000))
    assert batches[0].sparse.hotness == (1,) * 26
    dense = torch.tensor([[math.log1p(max(count or 0, 0)) for count in row] for row in rows.counts])
    # Libraries' float32 logarithms are off by 2 units in the last place at most, which are four
    # roundings; the expected ones are rounded once.
    torch.testing.assert_close(batches[0].dense, dense, rtol=relative_error(5), atol=0)
    got = reading.samples(batches)
    assert got.ids == [[[row[column] or 0] for row in rows.ids] for column in range(26)]


@pytest.mark.parametrize("kind", ["list", "large_list", "fixed"])
def test_kinds_of_lists(tmp_path: Path, kind: str) -> None:
    kinds = {
        "list": pa.list_(pa.int32()),
        "large_list": pa.large_list(pa.int64()),
        "fixed": pa.list_(pa.uint32(), 2),
    }
    table = pa.table(
        {
            "label": [0, 1],
            "x": [0.5, 1.5],
            "ids": pa.array([[1, 2], [3, None]], kinds[kind]),
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    source = ParquetClicks(
        tmp_path, batch_size=2, table_sizes=10, dense=("x",), categorical=("ids",)
    )
    assert reading.samples(source).ids == [[[1, 2], [3, 0]]]


def test_counts_that_float32_rounds_are_read(tmp_path: Path) -> None:
    """Prices in cents and times in seconds are greater than 2**24."""
    counts = [2**24 + 1, 2**53 + 1, -(2**40)]
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"label": [0, 1, 0], "x": counts, "id": [1, 2, 3]}), path)
    (batch,) = ParquetClicks(path, batch_size=3, table_sizes=5, dense=("x",), categorical=("id",))
    expected = np.log1p(np.maximum(np.array(counts).astype(np.float32), 0))
    assert batch.dense[:, 0].tolist() == expected.tolist()
    with pytest.raises(ValueError, match="row 1, column x: must be 0 or 1, got 16777217"):
        list(
            ParquetClicks(
                path, batch_size=3, table_sizes=5, label="x", dense=(), categorical=("id",)
            )
        )


def test_files_may_differ_in_the_widths_of_columns(tmp_path: Path) -> None:
    for number, (label, count, price, ids) in enumerate(
        [
            (pa.int64(), pa.int64(), pa.float64(), pa.list_(pa.int64())),
            (pa.bool_(), pa.uint8(), pa.float32(), pa.large_list(pa.uint32())),
        ]
    ):
        table = {
            "label": pa.array([0, 1], pa.int8()).cast(label),
            "count": pa.array([3 * number, None], count),
            "price": pa.array([0.5, None], price),
            "ids": pa.array([[number, 2], None], ids),
        }
        pq.write_table(pa.table(table), tmp_path / f"{number}.parquet")
    source = ParquetClicks(
        tmp_path, batch_size=3, table_sizes=10, dense=("count", "price"), categorical=("ids",)
    )
    found = reading.samples(source)
    assert found.ids == [[[0, 2], [], [1, 2], []]]
    assert found.labels.tolist() == [0, 1, 0, 1]
    log = np.log1p(np.float32(3)).item()
    assert found.dense.tolist() == [[0, 0.5], [0, 0], [log, 0.5], [0, 0]]


@pytest.mark.parametrize(
    ("column", "first", "second", "message"),
    [
        (
            "x",
            [1, 2],
            [1.0, None],
            r"column x must hold counts \(integers\), as in .*0.parquet, got numbers \(floats or",
        ),
        ("id", [1, 2], [[1], []], "id must hold integers, as in .*, got lists of integers; write"),
        ("id", [1, 2], ["1", "2"], "column id must hold integers, as in .*0.parquet, got texts"),
    ],
)
def test_files_whose_columns_would_be_read_otherwise_are_named(
    tmp_path: Path, column: str, first: list[Any], second: list[Any], message: str
) -> None:
    for number, values in enumerate((first, second)):
        table = {"label": [0, 1], "x": [1, 2], "id": [1, 2], column: values}
        pq.write_table(pa.table(table), tmp_path / f"{number}.parquet")
    with pytest.raises(ValueError, match=f"1.parquet: .*{message}"):
        ParquetClicks(
            tmp_path,
            batch_size=2,
            table_sizes=5,
            dense=("x",),
            categorical=("id",),
            raw_ids=True,
        )


def test_bad_labels_are_named(tmp_path: Path) -> None:
    for bad in (2, None):
        table = columns(50)
        table["click"][37] = bad
        path = write(tmp_path / "log.parquet", table)
        source = ParquetClicks(
            path, batch_size=4, table_sizes=SIZES, split=Split.HELD_OUT, held_out=0.5, **NAMES
        )
        message = rf"log.parquet, row 38, column click: must be 0 or 1, got {bad}"
        with pytest.raises(ValueError, match=message):
            list(source)


def test_bad_columns_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", columns(5))
    with pytest.raises(ValueError, match=r"log.parquet: has no column label, int_0, .* only click"):
        ParquetClicks(path, batch_size=4, table_sizes=5)
    for column, message in {
        "categorical": r"column unused must hold integers or lists of integers, got string; hash",
        "dense": r"column unused must hold numbers, got string; cast it",
    }.items():
        with pytest.raises(ValueError, match=message):
            ParquetClicks(path, batch_size=4, table_sizes=5, **{**NAMES, column: ("unused",)})
    with pytest.raises(ValueError, match="column price must hold integers or lists"):
        ParquetClicks(path, batch_size=4, table_sizes=5, **{**NAMES, "categorical": ("price",)})


@pytest.mark.parametrize("kind", ["dictionary", "list", "large_string", "binary"])
def test_ids_of_strings_are_refused(tmp_path: Path, kind: str) -> None:
    words = pa.array(["x", "y", "x"])
    kinds = {
        "dictionary": words.dictionary_encode(),
        "list": pa.array([["x"], [], None]),
        "large_string": words.cast(pa.large_string()),
        "binary": words.cast(pa.binary()),
    }
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"label": [0, 1, 0], "x": [1, 2, 3], "id": kinds[kind]}), path)
    message = rf"log.parquet: column id must hold integers or lists of integers, got {kind}"
    with pytest.raises(ValueError, match=message):
        ParquetClicks(path, batch_size=2, table_sizes=5, dense=("x",), categorical=("id",))


def test_names_of_columns_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", columns(5))
    for argument in ("dense", "categorical"):
        message = rf"{argument} must be a sequence of column names, got the string 'user'; write"
        with pytest.raises(TypeError, match=message):
            ParquetClicks(path, batch_size=4, table_sizes=5, **{**NAMES, argument: "user"})
    with pytest.raises(ValueError, match="categorical must name at least one column of ids"):
        ParquetClicks(path, batch_size=4, table_sizes=5, **{**NAMES, "categorical": ()})
    names = ["click", "age", "price", "user", "genres", "user"]
    pq.write_table(pa.table([pa.array([1, 0])] * 6, names=names), path)
    with pytest.raises(ValueError, match=r"log.parquet: has more than one column user; rename"):
        ParquetClicks(path, batch_size=4, table_sizes=SIZES, **NAMES)


def test_missing_pyarrow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "log.parquet", columns(5))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"log.parquet: reading Parquet needs pyarrow; pip"):
        ParquetClicks(path, batch_size=4, table_sizes=SIZES, **NAMES)


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", columns(500), group_rows=100)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"log.parquet: not a whole Parquet file"):
        ParquetClicks(path, batch_size=4, table_sizes=SIZES, **NAMES)
    path.write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :])
    with pytest.raises(ValueError, match=r"log.parquet: row group 0 is damaged"):
        list(ParquetClicks(path, batch_size=4, table_sizes=SIZES, **NAMES))
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"log.parquet: not a whole Parquet file"):
        ParquetClicks(path, batch_size=4, table_sizes=SIZES, **NAMES)
    names = ("click", "age", "price", "user", "genres")
    write(path, {name: pa.array([], pa.int32()) for name in names})
    with pytest.raises(ValueError, match=r"log.parquet: has no rows in split 'all'"):
        ParquetClicks(path, batch_size=4, table_sizes=SIZES, **NAMES)
    path.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"must be a Parquet file or a folder of \*.parquet"
    ):
        ParquetClicks(tmp_path, batch_size=4, table_sizes=SIZES, **NAMES)
