"""MLPerf's files: mapped in place, shared over ranks and days, and errors."""

import json
import re
import struct
import zipfile
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import reading
from torchembed.data import CAT_NAMES, MLPERF_TABLE_SIZES, MlperfDays, Split
from torchembed.data.mapped_npz import map_npy, map_npz

HOTNESS = (3, 1, 2, *[1] * 23)
SIZES = (50, 40, 30, *[20] * 23)


def write_day(folder: Path, day: int, num_rows: int) -> reading.Samples:
    random = np.random.default_rng(day)
    dense = random.random((num_rows, 13), np.float32)
    labels = random.integers(0, 2, (num_rows, 1), np.int32)
    ids = [
        random.integers(0, size, (num_rows, hotness), np.int32)
        for size, hotness in zip(SIZES, HOTNESS, strict=True)
    ]
    np.save(folder / f"day_{day}_dense.npy", dense)
    np.save(folder / f"day_{day}_labels.npy", labels)
    arrays = {str(feature): column for feature, column in enumerate(ids)}
    np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **arrays)
    return reading.Samples(
        torch.from_numpy(dense),
        [column.tolist() for column in ids],
        torch.from_numpy(labels[:, 0]).float(),
    )


def joined(parts: list[reading.Samples]) -> reading.Samples:
    return reading.Samples(
        torch.cat([day.dense for day in parts]),
        [list(chain(*columns)) for columns in zip(*(day.ids for day in parts), strict=True)],
        torch.cat([day.labels for day in parts]),
    )


def part(got: reading.Samples, start: int, stop: int) -> reading.Samples:
    ids = [column[start:stop] for column in got.ids]
    return reading.Samples(got.dense[start:stop], ids, got.labels[start:stop])


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("batch_size", [4, 25, 1000])
def test_every_row_arrives_once_and_in_order(
    tmp_path: Path, world_size: int, batch_size: int
) -> None:
    days = [write_day(tmp_path, day, rows) for day, rows in ((9, 30), (10, 1), (11, 52))]
    ranks = [
        MlperfDays(
            tmp_path, batch_size=batch_size, table_sizes=SIZES, rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]
    got = reading.samples(reading.in_turn(ranks))
    reading.assert_same_samples(got, joined(days))
    batch = next(iter(ranks[0]))
    assert batch.sparse.hotness == HOTNESS
    assert batch.sparse.values.dtype == torch.int32
    assert batch.dense.dtype == batch.labels.dtype == torch.float32


def test_last_day_is_held_out_in_halves(tmp_path: Path) -> None:
    days = [write_day(tmp_path, day, rows) for day, rows in ((0, 5), (1, 7), (2, 9))]
    expected = {
        Split.TRAIN: joined(days[:2]),
        Split.HELD_OUT: days[2],
        Split.VALIDATION: part(days[2], 0, 5),
        Split.TEST: part(days[2], 5, 9),
        Split.ALL: joined(days),
    }
    for split, samples in expected.items():
        source = MlperfDays(tmp_path, batch_size=4, table_sizes=SIZES, split=split)
        assert source.num_rows == len(samples.labels)
        reading.assert_same_samples(reading.samples(source), samples)


def test_only_day_is_divided(tmp_path: Path) -> None:
    day = write_day(tmp_path, 3, 20)
    source = MlperfDays(tmp_path, batch_size=4, table_sizes=SIZES, split=Split.TRAIN, held_out=0.25)
    reading.assert_same_samples(reading.samples(source), part(day, 0, 15))


def test_ids_are_taken_modulo_the_tables(tmp_path: Path) -> None:
    day = write_day(tmp_path, 0, 20)
    sizes = (7, 40, 9, *SIZES[3:])
    source = MlperfDays(tmp_path, batch_size=8, table_sizes=sizes)
    ids = [
        [[id_ % size for id_ in bag] for bag in column]
        for column, size in zip(day.ids, sizes, strict=True)
    ]
    assert reading.samples(source).ids == ids
    # The file behind the map is as it was.
    assert map_npz(tmp_path / "day_0_sparse_multi_hot.npz")["0"].tolist() == day.ids[0]


def test_table_sizes_come_from_the_folder(tmp_path: Path) -> None:
    write_day(tmp_path, 0, 20)
    assert MlperfDays(tmp_path, batch_size=8).table_sizes == MLPERF_TABLE_SIZES
    (tmp_path / "tables.json").write_text(json.dumps({"table_sizes": SIZES}))
    source = MlperfDays(tmp_path, batch_size=8)
    assert source.table_sizes == SIZES
    assert source.hotness == HOTNESS
    assert source.keys == CAT_NAMES
    assert MlperfDays(tmp_path, batch_size=8, table_sizes=9).table_sizes == (9,) * 26


ONES = [1] * 26


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"must be JSON, and cannot be read as such \(Expecting property name"),
        (b"", r"must be JSON, and cannot be read as such \(Expecting value"),
        (b"\xff\xfe", r"must be JSON, and cannot be read as such \('utf-8' codec"),
        (b"[1, 2]", "must be a JSON object with table_sizes, got list"),
        (b'{"sizes": [1]}', r"must be a JSON object with table_sizes, got \['sizes'\]"),
        ({"table_sizes": 5}, "table_sizes must be 26 positive integers, .*, got 5"),
        ({"table_sizes": ONES[1:]}, "table_sizes must be 26 positive integers"),
        ({"table_sizes": [*ONES[1:], 0]}, "table_sizes must be 26 positive integers"),
        ({"table_sizes": [*ONES[1:], 2.0]}, "table_sizes must be 26 positive integers"),
        ({"table_sizes": [*ONES[1:], True]}, "table_sizes must be 26 positive integers"),
        ({"table_sizes": ONES, "hotness": [*ONES, 1]}, "hotness must be 26 positive integers"),
        (
            {"table_sizes": ONES, "hotness": ONES},
            r"day_0_\S*: must have the hotness that \S*tables.json says, \[1, .*, got \[3, 1, 2, ",
        ),
    ],
)
def test_bad_tables_are_named(tmp_path: Path, content: bytes | dict, message: str) -> None:
    write_day(tmp_path, 0, 20)
    path = tmp_path / "tables.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError, match=re.escape(str(tmp_path)) + "/.*" + message):
        MlperfDays(tmp_path, batch_size=8)


def test_files_must_fit_together(tmp_path: Path) -> None:
    ids = np.zeros((20, 2), np.int32)
    features = dict.fromkeys(map(str, range(26)), ids)
    for name, array, message in (
        ("dense.npy", np.zeros((20, 13), np.float64), r"_dense.npy: must be float32 .*got float64"),
        ("dense.npy", np.zeros(20, np.float32), r"_dense.npy: must be float32 \[rows, 13\], got"),
        (
            "dense.npy",
            np.zeros((20, 12), np.float32),
            r"_dense.npy: must be float32 \[rows, 13\], got float32 \[20, 12\]; preprocess the day",
        ),
        (
            "labels.npy",
            np.zeros((19, 1), np.int32),
            r"_labels.npy: must be \[20\] or \[20, 1\], the rows of .*, got int32 \[19, 1\]",
        ),
        (
            "sparse_multi_hot.npz",
            {**features, "1": ids[:19]},
            r"npz, array 1: must be int32 or int64 \[20, hotness\], with .*, got int32 \[19, 2\]",
        ),
        (
            "sparse_multi_hot.npz",
            {**features, "0": ids[:, :0]},
            r"npz, array 0: must be int32 .* got int32 \[20, 0\]",
        ),
        (
            "sparse_multi_hot.npz",
            {**features, "0": ids.astype(np.int16)},
            r"npz, array 0: must be int32 .* got int16 \[20, 2\]",
        ),
        (
            "sparse_multi_hot.npz",
            {**features, "26": ids},
            r"npz: must hold 26 arrays, 0 to 25, one for each feature, got 27: 0, 1, .*, 26; pre",
        ),
        (
            "sparse_multi_hot.npz",
            {name: ids for name in features if name != "25"},
            r"npz: must hold 26 arrays, 0 to 25, one for each feature, got 25: 0, 1, .*, 24; pre",
        ),
        (
            "sparse_multi_hot.npz",
            {name if name != "3" else "26": ids for name in features},
            r"npz: must hold 26 arrays, 0 to 25, one for each feature, got 26: 0, 1, 2, 26, 4",
        ),
    ):
        write_day(tmp_path, 0, 20)
        path = tmp_path / f"day_0_{name}"
        if isinstance(array, dict):
            np.savez(path, **array)
        else:
            np.save(path, array)
        with pytest.raises(ValueError, match=message):
            MlperfDays(tmp_path, batch_size=4, table_sizes=50)
    write_day(tmp_path, 0, 20)
    write_day(tmp_path, 1, 20)
    np.savez(tmp_path / "day_1_sparse_multi_hot.npz", **features)
    message = r"day_1_\S*: must have the hotness that \S*day_0_\S* has, \[3, 1,.*, got \[2, 2, 2"
    with pytest.raises(ValueError, match=message):
        MlperfDays(tmp_path, batch_size=4, table_sizes=50)


@pytest.mark.parametrize("table_sizes", [50, 1 << 40])
def test_negative_ids_are_named(tmp_path: Path, table_sizes: int) -> None:
    for day in range(2):
        write_day(tmp_path, day, 20)
    path = tmp_path / "day_1_sparse_multi_hot.npz"
    arrays = dict(np.load(path))
    arrays["2"][13, 1] = -3
    np.savez(path, **arrays)
    # The second batch holds rows of both days.
    batches = iter(MlperfDays(tmp_path, batch_size=17, table_sizes=table_sizes))
    next(batches)
    with pytest.raises(
        ValueError,
        match=r"day_1_sparse_multi_hot.npz, array 2, row 14: ids must not be negative, "
        rf"got \[{arrays['2'][13, 0]}, -3\]; preprocess the day again",
    ):
        next(batches)


def test_days_without_rows_are_named(tmp_path: Path) -> None:
    write_day(tmp_path, 0, 0)
    with pytest.raises(ValueError, match="has no rows in split 'all'"):
        MlperfDays(tmp_path, batch_size=4, table_sizes=50)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"must be a folder that holds day_0_dense.npy"):
        MlperfDays(tmp_path, batch_size=4, table_sizes=50)
    write_day(tmp_path, 0, 20)
    for part in ("dense.npy", "labels.npy", "sparse_multi_hot.npz"):
        write_day(tmp_path, 1, 20)
        (tmp_path / f"day_1_{part}").unlink()
        with pytest.raises(FileNotFoundError, match=rf"day_1 lacks day_1_{part}; write the day"):
            MlperfDays(tmp_path, batch_size=4, table_sizes=50)


def test_missing_days_are_named(tmp_path: Path) -> None:
    for day in (8, 9, 10, 13):
        write_day(tmp_path, day, 20)
    message = r"numbered without gaps, and day_11 is missing between day_10 and day_13; add it"
    with pytest.raises(FileNotFoundError, match=message):
        MlperfDays(tmp_path, batch_size=4, table_sizes=50)


@pytest.mark.parametrize("part", ["dense.npy", "labels.npy", "sparse_multi_hot.npz"])
def test_cut_files_are_named(tmp_path: Path, part: str) -> None:
    write_day(tmp_path, 0, 200)
    path = tmp_path / f"day_0_{part}"
    whole = path.read_bytes()
    for size in (0, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=part):
            MlperfDays(tmp_path, batch_size=4, table_sizes=50)


def test_bad_labels_are_named(tmp_path: Path) -> None:
    write_day(tmp_path, 0, 20)
    write_day(tmp_path, 1, 20)
    labels = np.zeros((20, 1), np.int32)
    labels[13] = 4
    np.save(tmp_path / "day_1_labels.npy", labels)
    source = MlperfDays(tmp_path, batch_size=7, table_sizes=50, split=Split.TEST)
    with pytest.raises(
        ValueError, match=r"day_1_labels.npy, row 14: a label must be 0 or 1, got 4"
    ):
        list(source)


def test_arrays_are_mapped_where_they_lie(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = {
        "a": random.random((7, 3)),
        "long/name": np.asfortranarray(random.integers(0, 9, (5, 4), np.int32)),
        "empty": np.empty((0, 3), np.float32),
        "one": np.array(5),
    }
    np.savez(tmp_path / "arrays.npz", **arrays)
    mapped = map_npz(tmp_path / "arrays.npz")
    assert set(mapped) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(mapped[name], array)
        assert mapped[name].dtype == array.dtype
    assert isinstance(mapped["a"].base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        mapped["a"][0] = 1
    np.save(tmp_path / "a.npy", arrays["a"])
    np.testing.assert_array_equal(map_npy(tmp_path / "a.npy"), arrays["a"])


def test_arrays_that_cannot_be_mapped_are_named(tmp_path: Path) -> None:
    path = tmp_path / "arrays.npz"
    np.savez_compressed(path, a=np.zeros(5))
    with pytest.raises(ValueError, match=r"array a.npy: is compressed; write it with numpy.savez"):
        map_npz(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", "no array")
    with pytest.raises(ValueError, match=r"array a.npy: has no .npy header"):
        map_npz(path)
    np.savez(path, a=np.zeros(5), b=np.zeros(5))
    damaged = bytearray(path.read_bytes())
    damaged[:4] = struct.pack("<I", 0)
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"array a.npy: not where the archive says"):
        map_npz(path)
    objects = np.array([{}])
    np.save(tmp_path / "objects.npy", objects, allow_pickle=True)
    with pytest.raises(ValueError, match=r"objects.npy: holds objects, not numbers"):
        map_npy(tmp_path / "objects.npy")
