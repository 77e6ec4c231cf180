"""MLPerf's rules, by a plain loop over small rows, by TorchRec's own scripts, and read back."""

import dataclasses
import gzip
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import reading
from tests.support.object_stores import download, folder_of_url, upload
from torchembed.data import MISSING_ID, MLPERF_HOTNESS, MLPERF_TABLE_SIZES, MlperfDays
from torchembed.data.data_path import data_path

pytest.importorskip("polars", reason="the preprocessing counts ids with polars")
pytest.importorskip("tyro", reason="the preprocessing has a tyro command line")

from recipes.dlrm_dcnv2 import preprocess as script
from recipes.dlrm_dcnv2.preprocess import PreprocessConfig, preprocess


def write_days(folder: Path, days: list[reading.Rows]) -> Path:
    folder.mkdir()
    for day, rows in enumerate(days):
        data = reading.as_text(rows).encode()
        if day % 2:
            (folder / f"day_{day}.gz").write_bytes(gzip.compress(data))
        else:
            (folder / f"day_{day}").write_bytes(data)
    return folder


def expected_numbers(days: list[reading.Rows], threshold: int) -> list[list[list[int]]]:
    """``[day][feature][row]``: numbers from 2 by first appearance, 1 for infrequent ids."""
    numbers: list[list[list[int]]] = [[] for _ in days]
    for column in range(26):
        counts = Counter(row[column] or 0 for rows in days for row in rows.ids)
        given: dict[int, int] = {}
        for day, rows in enumerate(days):
            for row in rows.ids:
                id_ = row[column] or 0
                if counts[id_] >= threshold:
                    given.setdefault(id_, len(given) + 2)
            numbers[day].append([given.get(row[column] or 0, 1) for row in rows.ids])
    return numbers


def expected_bags(
    numbers: list[list[list[int]]], sizes: tuple[int, ...]
) -> list[list[np.ndarray[Any, Any]]]:
    """``[day][feature]``: each number and its draws, ``[rows, hotness]``."""
    random = np.random.RandomState(0)
    tables = []
    for size, hotness in zip(sizes, MLPERF_HOTNESS, strict=True):
        draws = random.randint(0, size, (size, hotness - 1))
        tables.append(np.concatenate([np.arange(size)[:, None], draws], axis=1))
    return [
        [
            table[np.array(column) % size]
            for table, size, column in zip(tables, sizes, day, strict=True)
        ]
        for day in numbers
    ]


@pytest.mark.parametrize("threshold", [0, 3])
@pytest.mark.parametrize("sizes", [None, tuple(range(3, 29))])
def test_files_follow_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threshold: int, sizes: tuple[int, ...] | None
) -> None:
    monkeypatch.setattr(script, "_BLOCK_ROWS", 7)
    days = [reading.random_rows(rows, seed, largest_id=12) for seed, rows in enumerate((20, 1, 33))]
    output = tmp_path / "output"
    config = PreprocessConfig(
        input=write_days(tmp_path / "input", days),
        output=output,
        frequency_threshold=threshold,
        max_rows=10,
        table_sizes=sizes,
        progress=False,
    )
    used = preprocess(config)
    numbers = expected_numbers(days, threshold)
    if sizes is None:
        in_use = [set().union(*(day[column] for day in numbers)) for column in range(26)]
        assert used == tuple(min(len(column), 10) for column in in_use)
    else:
        assert used == sizes
    assert json.loads((output / "tables.json").read_text()) == {
        "table_sizes": list(used),
        "hotness": list(MLPERF_HOTNESS),
    }
    for day, (rows, bags) in enumerate(zip(days, expected_bags(numbers, used), strict=True)):
        labels = np.load(output / f"day_{day}_labels.npy")
        assert labels.dtype == np.int32
        assert labels[:, 0].tolist() == rows.labels
        counts = np.array([[count or 0 for count in row] for row in rows.counts])
        dense = np.load(output / f"day_{day}_dense.npy")
        shifted = (counts - counts.min() + 2).astype(np.float32)
        np.testing.assert_array_equal(dense, np.log(shifted))
        archive = np.load(output / f"day_{day}_sparse_multi_hot.npz")
        assert list(archive) == [str(feature) for feature in range(26)]
        for feature, expected in enumerate(bags):
            assert archive[str(feature)].dtype == np.int32
            np.testing.assert_array_equal(archive[str(feature)], expected)
    assert sorted(path.name for path in output.iterdir()) == sorted(
        ["tables.json"]
        + [
            f"day_{day}_{part}"
            for day in range(3)
            for part in ("dense.npy", "labels.npy", "sparse_multi_hot.npz")
        ]
    )


def test_files_are_read_back(tmp_path: Path) -> None:
    days = [reading.random_rows(30, seed, largest_id=50) for seed in range(2)]
    output = tmp_path / "output"
    sizes = preprocess(
        PreprocessConfig(input=write_days(tmp_path / "input", days), output=output, progress=False)
    )
    source = MlperfDays(output, batch_size=11)
    assert source.hotness == MLPERF_HOTNESS
    assert source.table_sizes == sizes
    got = reading.samples(source)
    assert got.labels.tolist() == days[0].labels + days[1].labels
    bags = expected_bags(expected_numbers(days, 0), sizes)
    expected = [np.concatenate(columns).tolist() for columns in zip(*bags, strict=True)]
    assert got.ids == expected
    dense = [np.load(output / f"day_{day}_dense.npy") for day in range(2)]
    np.testing.assert_array_equal(got.dense.numpy(), np.concatenate(dense))


def test_raw_ids_are_those_of_the_text(tmp_path: Path) -> None:
    """And the others of a bag are functions of feature, place and id."""
    days = [reading.random_rows(30, seed=day) for day in range(2)]
    for rows in days:
        rows.ids[3] = [0] * 26
        rows.ids[4] = [None] * 26
    folder = write_days(tmp_path / "input", days)
    output = tmp_path / "output"
    config = PreprocessConfig(input=folder, output=output, raw_ids=True, progress=False)
    assert preprocess(config) == MLPERF_TABLE_SIZES
    source = MlperfDays(output, batch_size=25, raw_ids=True)
    assert source.table_sizes == MLPERF_TABLE_SIZES
    assert next(iter(source)).sparse.values.dtype is torch.int64
    found = reading.samples(source).ids
    seen: dict[tuple[int, int], list[int]] = {}
    for column, bags in enumerate(found):
        ids = [row[column] for rows in days for row in rows.ids]
        assert [bag[0] for bag in bags] == [MISSING_ID if id_ is None else id_ for id_ in ids]
        for bag in bags:
            assert seen.setdefault((column, bag[0]), bag) == bag
            assert len(set(bag)) == len(bag) == MLPERF_HOTNESS[column]
    # No two bags of different ids or features share an id that is not the text's.
    others = [id_ for bag in seen.values() for id_ in bag[1:]]
    assert len(set(others)) == len(others)
    dense = [np.load(output / f"day_{day}_dense.npy") for day in range(2)]
    preprocess(PreprocessConfig(input=folder, output=tmp_path / "numbered", progress=False))
    for day in range(2):
        numbered = np.load(tmp_path / "numbered" / f"day_{day}_dense.npy")
        assert np.array_equal(dense[day], numbered)


@pytest.mark.parametrize("threshold", [0, 3])
def test_real_rows_give_the_bits_of_torchrecs_scripts(tmp_path: Path, threshold: int) -> None:
    criteo = pytest.importorskip(
        "torchrec.datasets.criteo", reason="compared with TorchRec", exc_type=ImportError
    )
    texts = {
        0: reading.real_data("criteo_tb_day0_first1k") / "day_0.txt.gz",
        1: reading.real_data("criteo_kaggle_first10k") / "train.txt.gz",
    }
    (tmp_path / "input").mkdir()
    for day, path in texts.items():
        rows = gzip.decompress(path.read_bytes()).splitlines(keepends=True)[:2000]
        (tmp_path / "input" / f"day_{day}").write_bytes(b"".join(rows))
    with warnings.catch_warnings():
        # The scripts leave the text files open, among other things.
        warnings.simplefilter("ignore")
        for day in texts:
            parts = (tmp_path / f"day_{day}_{part}.npy" for part in ("dense", "sparse", "labels"))
            text_path = tmp_path / "input" / f"day_{day}"
            criteo.BinaryCriteoUtils.tsv_to_npys(str(text_path), *map(str, parts))
        sparse = [str(tmp_path / f"day_{day}_sparse.npy") for day in texts]
        criteo.BinaryCriteoUtils.sparse_to_contiguous(sparse, str(tmp_path), threshold)

    output = tmp_path / "output"
    sizes = preprocess(
        PreprocessConfig(
            input=tmp_path / "input",
            output=output,
            frequency_threshold=threshold,
            max_rows=500,
            progress=False,
        )
    )
    contiguous = [np.load(tmp_path / f"day_{day}_sparse_contig_freq.npy") for day in texts]
    bags = expected_bags([day.T.tolist() for day in contiguous], sizes)
    for day in texts:
        labels = np.load(tmp_path / f"day_{day}_labels.npy")
        np.testing.assert_array_equal(np.load(output / f"day_{day}_labels.npy"), labels)
        dense = np.load(tmp_path / f"day_{day}_dense.npy")
        np.testing.assert_array_equal(np.load(output / f"day_{day}_dense.npy"), dense)
        archive = np.load(output / f"day_{day}_sparse_multi_hot.npz")
        for feature, expected in enumerate(bags[day]):
            np.testing.assert_array_equal(archive[str(feature)], expected)


def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = write_days(tmp_path / "input", [reading.random_rows(20)])
    outputs = [tmp_path / "first", tmp_path / "second"]
    for output in outputs:
        preprocess(PreprocessConfig(input=folder, output=output, progress=False))
    for path in outputs[0].iterdir():
        assert path.read_bytes() == (outputs[1] / path.name).read_bytes()


def test_bad_rows_leave_nothing_behind(tmp_path: Path) -> None:
    days = [reading.random_rows(5), reading.random_rows(6, seed=1)]
    folder = write_days(tmp_path / "input", days)
    output = tmp_path / "output"
    config = PreprocessConfig(input=folder, output=output, progress=False)
    for bad, message in (
        (2, r"day_1.gz, row 4, column 1 \(label\): must be 0 or 1, got '2'"),
        (None, r"day_1.gz, row 4, column 3 \(int_1\): must fit a 32-bit integer, got 2147483648"),
    ):
        labels, counts, ids = reading.random_rows(6, seed=1)
        if bad is None:
            counts[3][1] = 1 << 31
        else:
            labels[3] = bad
        data = reading.as_text(reading.Rows(labels, counts, ids)).encode()
        (folder / "day_1.gz").write_bytes(gzip.compress(data))
        with pytest.raises(ValueError, match=message):
            preprocess(config)
        assert list(output.iterdir()) == []


def test_output_is_checked_before_work_starts(tmp_path: Path) -> None:
    folder = write_days(tmp_path / "input", [reading.random_rows(5)])
    (folder / "day_0").write_text("these rows would be an error")
    (tmp_path / "file").write_text("")
    blocked = PreprocessConfig(input=folder, output=tmp_path / "file" / "output", progress=False)
    with pytest.raises(OSError, match=r"output folder .*file/output can't be written: .*Not a dir"):
        preprocess(blocked)
    (tmp_path / "day_7_dense.npy").write_text("")
    with pytest.raises(FileExistsError, match=r"holds day_7_dense.npy already; move the files"):
        preprocess(PreprocessConfig(input=folder, output=tmp_path, progress=False))
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        preprocess(
            PreprocessConfig(input=tmp_path / "nowhere", output=tmp_path / "new", progress=False)
        )


def test_urls_give_the_bytes_of_local_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("upath", reason="URLs are read with universal-pathlib")
    write_days(tmp_path / "input", [reading.random_rows(20), reading.random_rows(3, seed=1)])
    local = PreprocessConfig(input=tmp_path / "input", output=tmp_path / "output", progress=False)
    sizes = preprocess(local)
    files = {path.name: path.read_bytes() for path in local.output.iterdir()}  # type: ignore[union-attr]
    with folder_of_url("s3") as url:
        upload(tmp_path / "input", f"{url}/input")
        config = PreprocessConfig(
            input=f"{url}/input", output=f"{url}/output", table_sizes=sizes, progress=False
        )
        preprocess(config)
        assert download(config.output) == files
        with pytest.raises(FileExistsError, match=rf"{url}/output holds day_0_dense.npy already"):
            preprocess(config)

        files_of_s3 = data_path(url).fs  # type: ignore[union-attr]
        put_file = files_of_s3.put_file

        def fail_at_last(source: str, target: str) -> None:
            if target.endswith("tables.json"):
                raise OSError("no space left")
            put_file(source, target)

        monkeypatch.setattr(files_of_s3, "put_file", fail_at_last)
        stopped = dataclasses.replace(config, output=f"{url}/stopped")
        with pytest.raises(OSError, match="no space left"):
            preprocess(stopped)
        assert download(f"{url}/stopped") == {}

        def refuse(*args: object) -> None:
            raise PermissionError("Forbidden")

        monkeypatch.setattr(files_of_s3, "pipe_file", refuse)
        with pytest.raises(OSError, match=rf"output folder {url}/stopped can't be written: Forb"):
            preprocess(stopped)


def test_day_that_is_there_twice_is_named(tmp_path: Path) -> None:
    folder = write_days(tmp_path / "input", [reading.random_rows(5)])
    (folder / "day_0.gz").write_bytes(gzip.compress((folder / "day_0").read_bytes()))
    with pytest.raises(ValueError, match=r"day_0.gz and day_0 are both day_0; keep one of them"):
        preprocess(PreprocessConfig(input=folder, output=tmp_path / "output", progress=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hotness": (1, 2)}, r"hotness must be 26 numbers of at least 1, got \[1, 2\]"),
        ({"table_sizes": (0,) * 26}, r"table_sizes must be 26 numbers of at least 1, got \[0,"),
        ({"max_rows": 0}, "max_rows must be at least 1, got 0"),
        ({"frequency_threshold": -1}, "frequency_threshold must not be negative, got -1"),
        ({"frequency_threshold": 2, "raw_ids": True}, "frequency_threshold must be 0 with raw_ids"),
    ],
)
def test_config_is_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreprocessConfig(input=Path("input"), output=Path("output"), **change)


def test_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_days(tmp_path / "input", [reading.random_rows(5)])
    output = tmp_path / "output"
    arguments = ["preprocess", "--input", str(folder), "--output", str(output), "--no-progress"]
    monkeypatch.setattr("sys.argv", arguments)
    script.main()
    assert "tables of" in capsys.readouterr().out
    assert (output / "tables.json").is_file()
    with pytest.raises(SystemExit, match=r"preprocess: output folder .* holds day_0_dense.npy"):
        script.main()
