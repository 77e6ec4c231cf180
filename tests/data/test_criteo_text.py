"""Criteo's text: every number arrives, on the rank that it should, and bad rows are named."""

import gzip
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import reading
from torchembed.data import CriteoText, Split
from torchembed.data import criteo_text_rows as text
from torchembed.data.criteo_text import text_files
from torchembed.data.source import FileRows

pytest.importorskip("polars", reason="Criteo's text is read with polars")

SIZES = tuple(range(7, 7 + 26))


def expected_samples(rows: reading.Rows) -> reading.Samples:
    dense = np.array([[max(count or 0, 0) for count in counts] for counts in rows.counts])
    ids = [[[(row[column] or 0) % size] for row in rows.ids] for column, size in enumerate(SIZES)]
    return reading.Samples(
        torch.from_numpy(np.log1p(dense.astype(np.float32))),
        ids,
        torch.tensor(rows.labels, dtype=torch.float32),
    )


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz", "day_0"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_row_arrives_once_and_in_order(tmp_path: Path, name: str, world_size: int) -> None:
    rows = reading.random_rows(103)
    path = write(tmp_path / name, reading.as_text(rows))
    ranks = [
        CriteoText(path, batch_size=8, table_sizes=SIZES, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    got = reading.samples(reading.in_turn(ranks))
    reading.assert_same_samples(got, expected_samples(rows))
    assert [len(rank) for rank in ranks] == ([13] if world_size == 1 else [5, 4, 4])


def test_blocks_and_files_may_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_CHUNK_BYTES", 999)
    rows = reading.random_rows(60)
    lines = reading.as_text(rows).splitlines(keepends=True)
    write(tmp_path / "day_9", "".join(lines[:17]).removesuffix("\n"))
    write(tmp_path / "day_10.gz", "".join(lines[17:]))
    write(tmp_path / "README", "not a day")
    source = CriteoText(tmp_path, batch_size=16, table_sizes=SIZES)
    assert source.num_rows == 60
    assert [batch.sparse.batch_size for batch in source] == [16, 16, 16, 12]
    reading.assert_same_samples(reading.samples(source), expected_samples(rows))


FIELD_COUNT = st.one_of(st.none(), st.integers(-(10**15) + 1, 10**15 - 1))
FIELD_ID = st.one_of(st.none(), st.integers(0, (1 << 32) - 1))
ROW = st.tuples(
    st.integers(0, 1),
    st.lists(FIELD_COUNT, min_size=13, max_size=13),
    st.lists(FIELD_ID, min_size=26, max_size=26),
)


@settings(max_examples=40)
@given(
    rows=st.lists(ROW, min_size=1, max_size=5),
    style=st.sampled_from(["{:x}", "{:08x}", "{:X}", "{:08X}"]),
    block_rows=st.integers(1, 5),
)
def test_numbers_are_parsed_exactly(
    tmp_path_factory: pytest.TempPathFactory, rows: list, style: str, block_rows: int
) -> None:
    lines = [
        "\t".join(
            [
                str(label),
                *("" if count is None else str(count) for count in counts),
                *("" if id_ is None else style.format(id_) for id_ in ids),
            ]
        )
        for label, counts, ids in rows
    ]
    path = write(tmp_path_factory.mktemp("text") / "log.txt", "\n".join(lines))
    blocks = list(text.row_blocks([FileRows(path)], block_rows))
    labels, counts, ids = text.parse_block([part for block in blocks for part in block])
    assert labels.tolist() == [label for label, _, _ in rows]
    assert counts.tolist() == [[count or 0 for count in counts] for _, counts, _ in rows]
    assert ids.tolist() == [[id_ or 0 for id_ in ids] for _, _, ids in rows]


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_splits_divide_the_rows(tmp_path: Path, num_files: int, world_size: int) -> None:
    rows = reading.random_rows(90, seed=1)
    lines = reading.as_text(rows).splitlines(keepends=True)
    ends = {1: [90], 3: [20, 69, 90]}[num_files]
    for day, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        write(tmp_path / f"day_{day}.gz", "".join(lines[start:end]))
    first_held_out = 69
    middle = {
        Split.TRAIN: (0, first_held_out),
        Split.HELD_OUT: (first_held_out, 90),
        Split.VALIDATION: (first_held_out, 80),
        Split.TEST: (80, 90),
        Split.ALL: (0, 90),
    }
    everything = expected_samples(rows)
    for split, (start, stop) in middle.items():
        ranks = [
            CriteoText(
                tmp_path,
                batch_size=4,
                table_sizes=SIZES,
                split=split,
                held_out=21 / 90,
                rank=rank,
                world_size=world_size,
            )
            for rank in range(world_size)
        ]
        assert ranks[0].num_rows == stop - start
        expected = reading.Samples(
            everything.dense[start:stop],
            [column[start:stop] for column in everything.ids],
            everything.labels[start:stop],
        )
        got = reading.samples(reading.in_turn(ranks))
        reading.assert_same_samples(got, expected)


def test_kaggle_folder_is_its_labelled_file(tmp_path: Path) -> None:
    for name in ("readme.txt", "test.txt", "train.txt"):
        write(tmp_path / name, "x")
    assert text_files(tmp_path) == [tmp_path / "train.txt"]


def edit(row: int, column: int, field: str) -> Callable[[list[list[str]]], None]:
    def change(fields: list[list[str]]) -> None:
        fields[row][column] = field

    return change


def insert(row: int, field: str) -> Callable[[list[list[str]]], None]:
    return lambda fields: fields[row].append(field)


BAD_ROWS = {
    "label not 0 or 1": (edit(4, 0, "2"), r"row 5, column 1 \(label\): must be 0 or 1, got '2'"),
    "label of two digits": (edit(4, 0, "01"), r"row 5, column 1 \(label\).*got '01'"),
    "label missing": (edit(0, 0, ""), r"row 1, column 1 \(label\).*got ''"),
    "count with a letter": (
        edit(9, 1, "1x"),
        r"row 10, column 2 \(int_0\): must be an integer of at most 15 digits, or empty, got '1x'",
    ),
    "count of a minus": (edit(9, 13, "-"), r"row 10, column 14 \(int_12\).*got '-'"),
    "count with a point": (edit(9, 3, "1.5"), r"row 10, column 4 \(int_2\).*got '1.5'"),
    "count too long": (edit(9, 3, "1" * 16), r"row 10, column 4 \(int_2\).*got '1{16}'"),
    "count with a late letter": (
        edit(9, 3, "12a456789012"),
        r"row 10, column 4 .*got '12a456789012'",
    ),
    "id not hexadecimal": (
        edit(7, 14, "0123456g"),
        r"row 8, column 15 \(cat_0\): must be a hexadecimal id .* or empty, got '0123456g'",
    ),
    "id too long": (edit(7, 39, "123456789"), r"row 8, column 40 \(cat_25\).*got '123456789'"),
    "id with a return": (edit(7, 39, "1234567\r"), r"row 8, column 40.*got '1234567\\r'"),
    "id of other characters": (edit(7, 20, "\x10ab"), r"row 8, column 21.*got '\\x10ab'"),
    "column too many": (
        insert(6, "00000001"),
        r"row 7: must have 40 .*columns \(label, 13 integers, 26 hexadecimal ids\), got 41: '",
    ),
    "column too few": (lambda fields: fields[6].pop(), r"row 7: must have 40 .*got 39: '"),
    "empty row": (lambda fields: fields[6].clear(), r"row 7: must have 40 .*got 1: ''"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
@pytest.mark.parametrize("batch_size", [3, 100])
def test_bad_rows_are_named(tmp_path: Path, case: str, batch_size: int) -> None:
    change, message = BAD_ROWS[case]
    fields = [line.split("\t") for line in reading.as_text(reading.random_rows(12)).splitlines()]
    change(fields)
    path = write(tmp_path / "bad.txt", "".join("\t".join(row) + "\n" for row in fields))
    with pytest.raises(ValueError, match=re.escape(str(path)) + ", " + message):
        list(CriteoText(path, batch_size=batch_size, table_sizes=10))


@settings(max_examples=200)
@given(field=st.binary(min_size=1, max_size=9), is_id=st.booleans())
def test_other_fields_are_refused(
    tmp_path_factory: pytest.TempPathFactory, field: bytes, is_id: bool
) -> None:
    pattern = rb"[0-9a-fA-F]{1,8}" if is_id else rb"-?[0-9]{1,15}"
    if re.fullmatch(pattern, field) or b"\t" in field or b"\n" in field:
        return
    fields = [b"0"] * 40
    fields[30 if is_id else 5] = field
    path = write(tmp_path_factory.getbasetemp() / "field.txt", b"\t".join(fields) + b"\n")
    with pytest.raises(ValueError, match=f"row 1, column {31 if is_id else 6} "):
        list(CriteoText(path, batch_size=2, table_sizes=10))


def test_row_numbers_go_on_over_blocks_and_skipped_rows(tmp_path: Path) -> None:
    fields = [line.split("\t") for line in reading.as_text(reading.random_rows(40)).splitlines()]
    fields[37][0] = "3"
    path = write(tmp_path / "bad.txt", "".join("\t".join(row) + "\n" for row in fields))
    source = CriteoText(
        path, batch_size=3, table_sizes=10, split=Split.TEST, rank=1, world_size=2, held_out=0.4
    )
    with pytest.raises(ValueError, match="row 38, column 1"):
        list(source)


def test_bad_files_are_named(tmp_path: Path) -> None:
    content = reading.as_text(reading.random_rows(200))
    whole = write(tmp_path / "whole.gz", content).read_bytes()
    for name, data in {
        "cut.gz": whole[: len(whole) // 2],
        "damaged.gz": whole[:500] + bytes(100) + whole[600:],
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=rf"{name}: the compressed file is cut off or damaged"):
            list(CriteoText(tmp_path / name, batch_size=10, table_sizes=10))
    for name in ("empty.txt", "empty.gz"):
        with pytest.raises(ValueError, match=f"{name} is empty"):
            list(CriteoText(write(tmp_path / name, ""), batch_size=10, table_sizes=10))
    cut = write(tmp_path / "cut.txt", content[:-300])
    num_rows = content[:-300].count("\n") + 1
    with pytest.raises(ValueError, match=f"row {num_rows}: must have 40 tab-separated columns"):
        list(CriteoText(cut, batch_size=10, table_sizes=10))


def test_endless_row_is_refused(tmp_path: Path) -> None:
    line = reading.as_text(reading.random_rows(1))
    path = write(tmp_path / "one_line.txt", 2 * line + "x" * 70_000 + "\n" + 2 * line)
    # The rows of the test split come after the long one.
    for split in (Split.ALL, Split.TEST):
        source = CriteoText(path, batch_size=10, table_sizes=10, split=split, held_out=0.4)
        with pytest.raises(ValueError, match=r"one_line.txt, row 3: goes on for"):
            list(source)


def test_missing_polars_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "log.txt", reading.as_text(reading.random_rows(3)))
    source = CriteoText(path, batch_size=10, table_sizes=10)
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ImportError, match=r"log.txt: reading Criteo's text needs polars; pip"):
        list(source)


def test_missing_days_are_named(tmp_path: Path) -> None:
    for name in ("day_0", "day_1.gz", "day_3"):
        write(tmp_path / name, "x")
    message = "numbered without gaps, and day_2 is missing between day_1 and day_3"
    with pytest.raises(FileNotFoundError, match=message):
        CriteoText(tmp_path, batch_size=10, table_sizes=10)


def test_nothing_to_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*nowhere"):
        CriteoText(tmp_path / "nowhere", batch_size=1, table_sizes=1)
    write(tmp_path / "picture.png", "x")
    with pytest.raises(FileNotFoundError, match=r"must hold train.txt, .* it has picture.png"):
        CriteoText(tmp_path, batch_size=1, table_sizes=1)


def test_arguments_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "log.txt", reading.as_text(reading.random_rows(3)))
    for message, arguments in {
        "batch_size must be at least 1, got 0": {"batch_size": 0, "table_sizes": 1},
        "table_sizes must be one number or 26, one for each feature, got 3": {
            "batch_size": 1,
            "table_sizes": (1, 2, 3),
        },
        "table_sizes must be at least 1, got 0": {"batch_size": 1, "table_sizes": 0},
        r"rank must lie in \[0, world_size = 2\), got 2": {
            "batch_size": 1,
            "table_sizes": 1,
            "rank": 2,
            "world_size": 2,
        },
        r"held_out must be a part of the rows, in \(0, 1\), got 2": {
            "batch_size": 1,
            "table_sizes": 1,
            "held_out": 2,
        },
        "split 'test' has none of its 3 rows": {
            "batch_size": 1,
            "table_sizes": 1,
            "split": Split.TEST,
        },
    }.items():
        with pytest.raises(ValueError, match=message):
            CriteoText(path, **arguments)
    for message, arguments in {
        "batch_size must be an int, got 2.5": {"batch_size": 2.5, "table_sizes": 1},
        "table_sizes must be whole numbers, got 1.0": {"batch_size": 1, "table_sizes": 1.0},
        "table_sizes must be whole numbers, got 2.5": {"batch_size": 1, "table_sizes": [1, 2.5]},
    }.items():
        with pytest.raises(TypeError, match=message):
            CriteoText(path, **arguments)
    assert CriteoText(path, batch_size=2, table_sizes=np.int64(7)).table_sizes == (7,) * 26


@pytest.mark.parametrize(
    ("folder", "num_rows", "num_clicks"),
    [("criteo_kaggle_first10k", 10_000, 2182), ("criteo_tb_day0_first1k", 1000, 21)],
)
def test_real_rows(folder: str, num_rows: int, num_clicks: int) -> None:
    source = CriteoText(reading.real_data(folder), batch_size=2048, table_sizes=1 << 20)
    batches = list(source)
    assert sum(len(batch.labels) for batch in batches) == num_rows == source.num_rows
    assert sum(int(batch.labels.sum()) for batch in batches) == num_clicks
    assert min(batch.dense.min() for batch in batches) == 0.0
    assert all(batch.dense.isfinite().all() for batch in batches)
    assert max(int(batch.sparse.values.max()) for batch in batches) < 1 << 20
