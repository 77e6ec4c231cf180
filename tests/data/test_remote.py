"""Readers of URLs give what they give of local files: batches, positions and errors."""

import gzip
import http.server
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support import reading
from tests.support.object_stores import counted_ranges, folder_of_url, upload
from torchembed.data import (
    BackgroundLoader,
    BatchSource,
    CriteoText,
    MlperfDays,
    ParquetClicks,
    Portion,
    Split,
    open_clicks,
)
from torchembed.data.data_path import ByteRange, data_path, read_ranges

pytest.importorskip("upath", reason="URLs are read with universal-pathlib")
pytest.importorskip("polars", reason="Criteo's text is read with polars")
pa = pytest.importorskip("pyarrow", reason="Parquet files are read with pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="Parquet files are read with pyarrow")

FILE_ROWS = (23, 9, 31)


@pytest.fixture(scope="module", params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with folder_of_url(request.param) as url:
        yield url


@pytest.fixture(scope="module")
def memory() -> Iterator[str]:
    with folder_of_url("memory") as url:
        yield url


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with folder_of_url("s3") as url:
        yield url


def write_text(folder: Path) -> None:
    for day, rows in enumerate(FILE_ROWS):
        text = reading.as_text(reading.random_rows(rows, seed=day)).encode()
        name, data = ("day_1.gz", gzip.compress(text)) if day == 1 else (f"day_{day}", text)
        (folder / name).write_bytes(data)


def write_mlperf(folder: Path) -> None:
    random = np.random.default_rng(0)
    for day, rows in enumerate(FILE_ROWS):
        np.save(folder / f"day_{day}_dense.npy", random.random((rows, 13), np.float32))
        labels = random.integers(0, 2, (rows, 1) if day else rows, np.int32)
        np.save(folder / f"day_{day}_labels.npy", labels)
        ids = {str(f): random.integers(0, 9, (rows, 1 + f % 3), np.int32) for f in range(26)}
        np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **ids)


def write_parquet(folder: Path) -> None:
    for day, rows in enumerate(FILE_ROWS):
        numbers = list(range(rows))
        table = {"label": [n % 2 for n in numbers], "n": numbers, "m": numbers, "id": numbers}
        pq.write_table(pa.table(table), folder / f"{day}.parquet", row_group_size=7)


COLUMNS = {"dense": ("n", "m"), "categorical": ("id",)}
FORMATS: dict[str, tuple[Callable[[Path], None], Callable[..., BatchSource]]] = {
    "text": (write_text, partial(CriteoText, table_sizes=50)),
    "mlperf": (write_mlperf, partial(MlperfDays, table_sizes=50)),
    "parquet": (write_parquet, partial(ParquetClicks, table_sizes=50, **COLUMNS)),
}


@pytest.fixture(scope="module", params=FORMATS)
def places(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, url: str
) -> tuple[Callable[..., BatchSource], Path, str]:
    """A reader, and the local folder and the URL of the same files."""
    write, reader = FORMATS[request.param]
    folder = tmp_path_factory.mktemp("clicks")
    write(folder)
    return reader, folder, upload(folder, f"{url}/{request.param}")


@pytest.mark.parametrize("split", [Split.TRAIN, Split.VALIDATION])
def test_every_split_is_that_of_local_files(
    places: tuple[Callable[..., BatchSource], Path, str], split: Split
) -> None:
    reader, folder, url = places
    for rank in range(2):
        share = {"batch_size": 8, "rank": rank, "world_size": 2, "split": split}
        local, remote = reader(folder, **share), reader(url, **share)
        assert len(remote) == len(local)
        assert remote.num_rows == local.num_rows
        reading.assert_same_samples(reading.samples(remote), reading.samples(local))


def test_reading_goes_on_in_the_middle(
    places: tuple[Callable[..., BatchSource], Path, str],
) -> None:
    reader, folder, url = places
    after = [Portion(3, 4, 2), Portion(1, 7, 1)]
    share = {"batch_size": 9, "rank": 1, "world_size": 2}
    expected = reading.samples(reader(folder, **share).begin(after))
    with BackgroundLoader(reader(url, **share), num_threads=2) as loader:
        reading.assert_same_samples(reading.samples(loader.begin(after)), expected)


def test_a_single_file_is_read(places: tuple[Callable[..., BatchSource], Path, str]) -> None:
    reader, folder, url = places
    if reader.func is MlperfDays:  # type: ignore[attr-defined]
        with pytest.raises(FileNotFoundError, match=r"day_0_dense.npy must be a folder that holds"):
            reader(f"{url}/day_0_dense.npy", batch_size=7)
        return
    name = next(path.name for path in sorted(folder.iterdir()))
    expected = reading.samples(reader(folder / name, batch_size=7))
    reading.assert_same_samples(reading.samples(reader(f"{url}/{name}", batch_size=7)), expected)


def test_the_reader_is_that_of_local_files(
    places: tuple[Callable[..., BatchSource], Path, str],
) -> None:
    reader, _, url = places
    if reader.func is ParquetClicks:  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"parquet/0\.parquet: has no column"):
            open_clicks(url, batch_size=4, table_sizes=50)
        return
    source = open_clicks(url, batch_size=4, table_sizes=50)
    assert type(source) is reader.func  # type: ignore[attr-defined]


def damage(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


def with_bad_labels(folder: Path) -> None:
    table = pq.read_table(folder / "2.parquet")
    labels = [*table["label"].to_pylist()[:-1], 2]
    pq.write_table(table.set_column(0, "label", [labels]), folder / "2.parquet")


def with_negative_ids(folder: Path) -> None:
    archive = dict(np.load(folder / "day_1_sparse_multi_hot.npz"))
    archive["7"][4] = -1
    np.savez(folder / "day_1_sparse_multi_hot.npz", **archive)


def with_compressed_ids(folder: Path) -> None:
    path = folder / "day_1_sparse_multi_hot.npz"
    np.savez_compressed(path, **np.load(path))


FAULTS: list[tuple[str, str, Callable[[Path], object]]] = [
    ("text", "row 9, column 1", lambda f: damage(f, "day_2", lambda b: reversed_line(b, 8))),
    ("text", "cut off or damaged before its byte", lambda f: damage(f, "day_1.gz", cut)),
    ("text", "is empty", lambda f: damage(f, "day_0", lambda b: b"")),
    ("text", "day_1 is missing between", lambda f: (f / "day_1.gz").unlink()),
    (
        "text",
        "must hold train.txt, day_",
        lambda f: [p.rename(f / f"x{p.name}") for p in f.glob("*")],
    ),
    ("parquet", "row 31, column label", with_bad_labels),
    ("parquet", "not a whole Parquet file", lambda f: damage(f, "1.parquet", cut)),
    ("mlperf", "array 7, row 5: ids must not be negative", with_negative_ids),
    ("mlperf", "is compressed", with_compressed_ids),
    ("mlperf", "not a whole .npz", lambda f: damage(f, "day_2_sparse_multi_hot.npz", cut)),
    ("mlperf", "it may be cut off", lambda f: damage(f, "day_2_dense.npy", cut)),
    ("mlperf", "day_2 lacks day_2_labels", lambda f: (f / "day_2_labels.npy").unlink()),
    ("mlperf", "tables.json: must be JSON", lambda f: (f / "tables.json").write_text("{")),
]


def reversed_line(data: bytes, number: int) -> bytes:
    lines = data.split(b"\n")
    lines[number] = lines[number][::-1] + b"\tx"
    return b"\n".join(lines).replace(lines[number], b"7" + lines[number][1:-2])


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


@pytest.mark.parametrize(
    ("kind", "message", "harm"), FAULTS, ids=[f"{k}: {m}" for k, m, _ in FAULTS]
)
def test_errors_are_those_of_local_files(
    tmp_path: Path, memory: str, kind: str, message: str, harm: Callable[[Path], object]
) -> None:
    write, reader = FORMATS[kind]
    write(tmp_path)
    harm(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError)) as local:
        reading.samples(reader(tmp_path, batch_size=50, split=Split.ALL))
    remote_url = upload(tmp_path, f"{memory}/{tmp_path.name}")
    with pytest.raises(local.type) as remote:
        reading.samples(reader(remote_url, batch_size=50, split=Split.ALL))
    assert message in str(local.value)
    assert str(remote.value) == str(local.value).replace(str(tmp_path), remote_url)


def test_what_is_not_there_is_named(url: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"no file or folder {url}/nothing"):
        CriteoText(f"{url}/nothing", batch_size=4, table_sizes=50)
    with pytest.raises(FileNotFoundError, match=f"{url}/nothing must be a folder that holds day_0"):
        MlperfDays(f"{url}/nothing", batch_size=4)
    with pytest.raises(FileNotFoundError, match=f"{url}/nothing must be a Parquet file or a fol"):
        ParquetClicks(f"{url}/nothing", batch_size=4, table_sizes=50)


def test_only_what_is_read_is_fetched(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, (write, _) in FORMATS.items():
        (tmp_path / kind).mkdir()
        write(tmp_path / kind)
    noise = pa.array([np.random.default_rng(row).bytes(9999) for row in range(FILE_ROWS[2])])
    path = tmp_path / "parquet" / "2.parquet"
    pq.write_table(pq.read_table(path).append_column("noise", noise), path)
    long_text = (tmp_path / "text" / "day_0").read_bytes() * 3000
    (tmp_path / "text" / "day_0").write_bytes(long_text)
    assert len(long_text) > 16e6
    upload(tmp_path, s3)
    ranges = counted_ranges(monkeypatch)

    text = CriteoText(f"{s3}/text", batch_size=20, table_sizes=50)
    next(iter(text))
    assert sum(size for _, size in ranges) < 9e6

    days = MlperfDays(f"{s3}/mlperf", batch_size=4)
    ranges.clear()
    next(days.begin([Portion(1, 4, 3)]))
    row_bytes = 4 * (13 + 1 + sum(days.hotness))
    assert len(ranges) == 28
    assert sum(size for _, size in ranges) == 4 * row_bytes

    clicks = ParquetClicks(f"{s3}/parquet", batch_size=4, table_sizes=50, **COLUMNS)
    ranges.clear()
    reading.samples(clicks)
    fetched = sum(size for name, size in ranges if name == "2.parquet")
    assert fetched < path.stat().st_size / 3


def test_text_that_has_changed_is_counted_anew(tmp_path: Path, url: str) -> None:
    for rows in (3, 5):
        (tmp_path / "train.txt").write_text(reading.as_text(reading.random_rows(rows)))
        upload(tmp_path, f"{url}/changing")
        source = CriteoText(f"{url}/changing", batch_size=4, table_sizes=50)
        assert source.num_rows == rows


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The address of a web server of ``tmp_path`` that gives whole files only."""
    handler = partial(_Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_files_of_web_servers(tmp_path: Path, web: str) -> None:
    write_text(tmp_path)
    for name in ("day_0", "day_1.gz"):
        expected = reading.samples(CriteoText(tmp_path / name, batch_size=7, table_sizes=50))
        source = CriteoText(f"{web}/{name}", batch_size=7, table_sizes=50)
        reading.assert_same_samples(reading.samples(source), expected)


def test_servers_without_ranges_are_named(tmp_path: Path, web: str) -> None:
    write_mlperf(tmp_path)
    with pytest.raises(ValueError, match=rf"{web}/day_0_sparse_multi_hot.npz: parts of it cannot"):
        MlperfDays(web, batch_size=4)
    path = data_path(f"{web}/day_2_dense.npy")
    with pytest.raises(ValueError, match=r"bytes 1 to 9 must be 8, .* server gives no ranges"):
        read_ranges([ByteRange(path, 1, 9)])


def test_local_paths_need_no_package(tmp_path: Path) -> None:
    assert data_path(tmp_path) is tmp_path
    assert data_path(str(tmp_path)) == tmp_path
    for protocol in ("file", "local"):
        assert data_path(f"{protocol}://{tmp_path}") == tmp_path


def test_urls_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"must be a string where it is a URL, got .*'s3:/b/day_0'"
    ):
        data_path(Path("s3://b/day_0"))
    with pytest.raises(ValueError, match=r"a URL that fsspec knows, got 'nowhere://x'"):
        data_path("nowhere://x")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match=r"gs://b/x: its protocol needs another package .*gcsfs"):
        data_path("gs://b/x")
    monkeypatch.setitem(sys.modules, "upath", None)
    with pytest.raises(ImportError, match=r"needs universal-pathlib; pip install"):
        data_path("s3://b/x")
