"""MLPerf's files: mapped in place, shared over ranks and days, and errors."""

import json
import struct
import zipfile
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data import reading
from torchembed.data import MLPERF_HOTNESS, MLPERF_TABLE_SIZES, MlperfDays, Split
from torchembed.data.mapped_npz import map_npy, map_npz

HOTNESS, SIZES = (3, 1, 2), (50, 40, 30)


def write_day(folder: Path, day: int, num_rows: int) -> reading.Samples:
    random = np.random.default_rng(day)
    dense = random.random((num_rows, 4), np.float32)
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
    source = MlperfDays(tmp_path, batch_size=8, table_sizes=(7, 40, 9))
    ids = [
        [[id_ % size for id_ in bag] for bag in column]
        for column, size in zip(day.ids, (7, 40, 9), strict=True)
    ]
    assert reading.samples(source).ids == ids
    # The file behind the map is as it was.
    assert map_npz(tmp_path / "day_0_sparse_multi_hot.npz")["0"].tolist() == day.ids[0]


def test_table_sizes_come_from_the_folder(tmp_path: Path) -> None:
    write_day(tmp_path, 0, 20)
    with pytest.raises(ValueError, match=r"give table_sizes: .* has no tables.json"):
        MlperfDays(tmp_path, batch_size=8)
    (tmp_path / "tables.json").write_text(json.dumps({"table_sizes": SIZES}))
    assert MlperfDays(tmp_path, batch_size=8).table_sizes == SIZES
    mlperf = tmp_path / "mlperf"
    mlperf.mkdir()
    np.save(mlperf / "day_0_dense.npy", np.zeros((1, 13), np.float32))
    np.save(mlperf / "day_0_labels.npy", np.zeros(1, np.int32))
    arrays = {str(f): np.zeros((1, hotness), np.int32) for f, hotness in enumerate(MLPERF_HOTNESS)}
    np.savez(mlperf / "day_0_sparse_multi_hot.npz", **arrays)
    source = MlperfDays(mlperf, batch_size=8)
    assert source.table_sizes == MLPERF_TABLE_SIZES
    assert source.hotness == MLPERF_HOTNESS
    assert len(MLPERF_TABLE_SIZES) == len(source.keys) == 26


def test_files_must_fit_together(tmp_path: Path) -> None:
    ids = np.zeros((20, 2), np.int32)
    for name, array, message in (
        ("dense.npy", np.zeros((20, 4), np.float64), r"_dense.npy: must be float32 .*got float64"),
        ("dense.npy", np.zeros(20, np.float32), r"_dense.npy: must be float32 \[rows, num_dense\]"),
        (
            "labels.npy",
            np.zeros((19, 1), np.int32),
            r"_labels.npy: must be \[20\] or \[20, 1\], the rows of .*, got int32 \[19, 1\]",
        ),
        (
            "sparse_multi_hot.npz",
            {"0": ids, "1": ids[:19]},
            r"npz, array 1: must be int32 \[20, hotness\], with .*, got int32 \[19, 2\]",
        ),
        (
            "sparse_multi_hot.npz",
            {"0": ids[:, :0]},
            r"npz, array 0: must be int32 .* got int32 \[20, 0\]",
        ),
        (
            "sparse_multi_hot.npz",
            {"0": ids.astype(np.int64)},
            r"npz, array 0: must be int32 .* got int64 \[20, 2\]",
        ),
        (
            "sparse_multi_hot.npz",
            {"0": ids, "2": ids},
            r"npz: must hold the arrays 0, 1, ... one for each feature, has 0, 2",
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
    np.savez(tmp_path / "day_1_sparse_multi_hot.npz", **{"0": ids})
    with pytest.raises(ValueError, match="the days differ in their columns or hotness"):
        MlperfDays(tmp_path, batch_size=4, table_sizes=50)


def test_days_without_rows_are_named(tmp_path: Path) -> None:
    write_day(tmp_path, 0, 0)
    with pytest.raises(ValueError, match="has no rows in split 'all'"):
        MlperfDays(tmp_path, batch_size=4, table_sizes=50)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"must be a folder that holds day_0_dense.npy"):
        MlperfDays(tmp_path, batch_size=4, table_sizes=50)
    write_day(tmp_path, 0, 20)
    (tmp_path / "day_0_labels.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"day_0 lacks day_0_labels.npy"):
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
