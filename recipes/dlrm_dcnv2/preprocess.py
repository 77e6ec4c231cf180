"""Turns Criteo 1TB's text into the files that MLPerf's DLRM-DCNv2 trains on.

    python -m recipes.dlrm_dcnv2.preprocess --input FOLDER --output FOLDER

``FOLDER`` holds ``day_0`` ... ``day_23``, plain or gzip. For each day this writes
``day_{i}_dense.npy``, ``day_{i}_labels.npy`` and ``day_{i}_sparse_multi_hot.npz``, and beside them
``tables.json`` with the tables' sizes. The rules are those of MLPerf Training's reference (the
Criteo scripts of TorchRec's ``datasets`` and of ``facebookresearch/dlrm/torchrec_dlrm``):

- Dense: a missing count is 0. With m the smallest count of the day's file, over all 13 columns, a
  count x becomes ``log(x - m + 2)``, float32. Equal to the reference's up to the last bits of
  numpy's float32 logarithm, which differ between kinds of CPU.
- Ids: hexadecimal, a missing one is 0. Each column's ids are numbered from 2 in the order in which
  they first appear, over all days; with ``frequency_threshold`` above 1, those that appear less
  often share the number 1 (the reference's data has no threshold). Equal to the reference's.
- The cap: a number is taken modulo its table's size. A table has as many rows as its column has
  numbers in use, and ``max_rows`` at most, unless ``table_sizes`` says otherwise.
- Multi-hot: number i of feature f becomes ``hotness[f]`` ids: i itself, then row i of
  ``randint(0, size, (size, hotness - 1))``, drawn for the features in order from numpy's legacy
  generator with seed 0. Equal to the reference's where the tables' sizes are.
- Not done: the reference shuffles the rows of days 0 to 22 in memory, as one float32 array, which
  also rounds numbers above 2**24. Here rows stay in their order, and numbers exact, so its
  published checksums are not met.

With ``raw_ids``, for dynamic tables, ids are not numbered: an id is its hexadecimal number, a
missing one ``torchembed.data.MISSING_ID``, and each becomes itself and ``hotness[f] - 1`` ids that
are 64-bit hashes of feature, place and id. The archives then hold int64, and no pass counts ids.

Rows pass through in blocks. What is held at once is one block, or the distinct ids of one column
with their counts. The files appear in the output folder when all of them are whole; until then they
are in a hidden folder there, with about 60 bytes a row of intermediate files and one feature's
draws (16 GB for the largest of MLPerf's). A run that is stopped leaves nothing and begins anew.

Both folders may be URLs that fsspec knows, as ``s3://bucket/clicks``. Text is then read in a stream
and the files are made in a local folder for temporary files (``TMPDIR``), which needs room for all
of them, and copied when all are whole, ``tables.json`` last: where it is missing, a run was killed
while it copied, and what it left is to be removed.
"""

import contextlib
import dataclasses
import json
import re
import secrets
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from numpy.lib import format as npy_format
from numpy.typing import NDArray
from tqdm import tqdm

from torchembed.core.random_bits import name_key
from torchembed.data import CAT_NAMES, INT_NAMES, MISSING_ID, MLPERF_HOTNESS, MLPERF_TABLE_SIZES
from torchembed.data.counter_bits import counter_bits
from torchembed.data.criteo_text import text_files
from torchembed.data.criteo_text_rows import CriteoRows, parse_block, row_blocks
from torchembed.data.data_path import DataPath, data_path, is_remote
from torchembed.data.mlperf_tables import TABLES_FILE
from torchembed.data.source import FileRows

if TYPE_CHECKING:
    from upath import UPath

_BLOCK_ROWS = 1 << 17
_FIRST_NUMBER = 2
_INFREQUENT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """Input and output of the preprocessing, and the rules' numbers."""

    # A string first: the command line takes the first that fits, and a Path takes a slash of URLs.
    input: str | Path
    """Folder with the days' text files, or a single such file, or its URL."""
    output: str | Path
    """Folder for the files, or its URL; made where it is not there."""
    frequency_threshold: int = 0
    """Ids that a column holds fewer times share one row; MLPerf has no threshold."""
    max_rows: int = 40_000_000
    """Most rows of a table."""
    table_sizes: tuple[int, ...] | None = None
    """Rows of each table; from the ids that are there where None."""
    hotness: tuple[int, ...] = MLPERF_HOTNESS
    """Ids that each id becomes, for each feature."""
    raw_ids: bool = False
    """Write ids as they stand, for dynamic tables: without a pass that numbers them, and int64.
    Tables have MLPerf's sizes, ``max_rows`` at most, where ``table_sizes`` does not say."""
    progress: bool = True
    """Show a progress bar."""

    def __post_init__(self) -> None:
        for name in ("table_sizes", "hotness"):
            numbers = getattr(self, name)
            if numbers is not None and (len(numbers) != len(CAT_NAMES) or min(numbers) < 1):
                raise ValueError(
                    f"{name} must be {len(CAT_NAMES)} numbers of at least 1, got {list(numbers)}"
                )
        if self.max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {self.max_rows}")
        if self.frequency_threshold < 0:
            raise ValueError(
                f"frequency_threshold must not be negative, got {self.frequency_threshold}"
            )
        if self.raw_ids and self.frequency_threshold:
            raise ValueError(
                "frequency_threshold must be 0 with raw_ids, which count nothing, got "
                f"{self.frequency_threshold}; give dynamic tables an admission"
            )


@dataclasses.dataclass(frozen=True)
class _Day:
    """A day while it is worked on."""

    name: str
    rows_path: Path
    """Its rows as Parquet: their number over all days, label, counts, ids."""
    num_rows: int
    min_count: int


def preprocess(config: PreprocessConfig) -> tuple[int, ...]:
    """Write the files of ``config.output`` and return the tables' sizes.

    Raises:
        FileNotFoundError, FileExistsError: where there is nothing to read, or the output folder
            holds days already.
        OSError: where the output folder cannot be written; before anything is read.
        ValueError: for a malformed row or file; names file, row, column and what came.
    """
    inputs, output = text_files(data_path(config.input)), data_path(config.output)
    with _work_folder(output) as work:
        days = _parse_days(inputs, work, config)
        for day in days:
            _write_labels_and_dense(day, work)
        table_sizes = (_write_raw_ids if config.raw_ids else _write_ids)(days, work, config)
        tables = {"table_sizes": table_sizes, "hotness": config.hotness}
        (work / TABLES_FILE).write_text(json.dumps(tables))
        for day in days:
            day.rows_path.unlink()
        if is_remote(output):
            _copy_files(work, output)
        else:
            for path in sorted(work.iterdir()):
                path.replace(output / path.name)
    return table_sizes


def _copy_files(work: Path, output: "UPath") -> None:
    """Copy all files of ``work``, ``tables.json`` last; none stay where one of them fails."""
    begun: list[UPath] = []
    try:
        for path in sorted(work.iterdir(), key=lambda path: (path.name == TABLES_FILE, path.name)):
            begun.append(output / path.name)
            output.fs.put_file(str(path), begun[-1].path)
    except BaseException:
        for path in begun:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        raise


@contextlib.contextmanager
def _work_folder(output: DataPath) -> Iterator[Path]:
    """A folder inside ``output``, on the same disk, so that a file moves up at once and whole; for
    a URL a folder of temporary files."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        if is_remote(output):
            trial = output / f".preprocess-{secrets.token_hex(8)}"
            trial.fs.pipe_file(trial.path, b"")
            trial.unlink()
            folder = tempfile.TemporaryDirectory(prefix="preprocess-")
        else:
            folder = tempfile.TemporaryDirectory(dir=output, prefix=".preprocess-")
    except OSError as error:
        raise OSError(f"output folder {output} can't be written: {error}") from error
    with folder as work:
        if present := sorted(path.name for path in output.glob("day_*.np[yz]")):
            raise FileExistsError(
                f"output folder {output} holds {present[0]} already; move the files away, or give "
                "another folder"
            )
        yield Path(work)


def _parse_days(inputs: list[DataPath], work: Path, config: PreprocessConfig) -> list[_Day]:
    named: dict[str, DataPath] = {}
    for position, path in enumerate(inputs):
        match = re.match(r"day_\d+", path.name)
        name = match[0] if match else f"day_{position}"
        if name in named:
            raise ValueError(f"{path} and {named[name].name} are both {name}; keep one of them")
        named[name] = path
    days, first_row = [], 0
    for name, path in tqdm(named.items(), "parse days", disable=not config.progress):
        day = _parse_day(path, name, first_row, work, raw_ids=config.raw_ids)
        days.append(day)
        first_row += day.num_rows
    return days


def _parse_day(path: DataPath, name: str, first_row: int, work: Path, *, raw_ids: bool) -> _Day:
    num_rows, min_counts = 0, []
    schema = pa.schema(
        [
            ("row", pa.int64()),
            ("label", pa.int32()),
            *((column, pa.int32()) for column in INT_NAMES),
            *((column, pa.int64() if raw_ids else pa.uint32()) for column in CAT_NAMES),
        ]
    )
    rows_path = work / f"{name}.rows"
    with pq.ParquetWriter(rows_path, schema, compression="zstd") as writer:
        for block in row_blocks([FileRows(path)], _BLOCK_ROWS):
            rows = parse_block(block, MISSING_ID if raw_ids else 0)
            _check_int32(path, num_rows, rows)
            numbers = np.arange(len(rows.labels)) + (first_row + num_rows)
            columns = [numbers, rows.labels, *rows.counts.T, *rows.ids.T]
            writer.write_table(
                pa.table(
                    [
                        column.astype(field.type.to_pandas_dtype())
                        for column, field in zip(columns, schema, strict=True)
                    ],
                    schema=schema,
                )
            )
            min_counts.append(int(rows.counts.min()))
            num_rows += len(numbers)
    return _Day(name, rows_path, num_rows, min(min_counts))


def _check_int32(path: DataPath, first_row: int, rows: CriteoRows) -> None:
    bad = rows.counts != rows.counts.astype(np.int32)
    if bad.any():
        row, column = divmod(int(bad.argmax()), len(INT_NAMES))
        raise ValueError(
            f"{path}, row {first_row + row + 1}, column {column + 2} ({INT_NAMES[column]}): must "
            f"fit a 32-bit integer, got {rows.counts[row, column]}"
        )


def _blocks(
    day: _Day, columns: tuple[str, ...]
) -> Iterator[tuple[slice, list[NDArray[np.generic]]]]:
    """Some columns of a day, block by block, each with the rows that it is."""
    start = 0
    with pq.ParquetFile(day.rows_path) as file:
        for block in file.iter_batches(_BLOCK_ROWS, columns=list(columns)):
            rows = slice(start, start + block.num_rows)
            yield rows, [block.column(name).to_numpy() for name in columns]
            start = rows.stop


def _write_labels_and_dense(day: _Day, work: Path) -> None:
    def new_array(part: str, dtype: type, width: int) -> np.memmap:
        shape = (day.num_rows, width)
        return npy_format.open_memmap(work / f"{day.name}_{part}.npy", "w+", dtype, shape)

    labels, dense = new_array("labels", np.int32, 1), new_array("dense", np.float32, len(INT_NAMES))
    for rows, (label, *counts) in _blocks(day, ("label", *INT_NAMES)):
        labels[rows, 0] = label
        shifted = np.stack(counts, axis=1).astype(np.int64) - (day.min_count - 2)
        np.log(shifted.astype(np.float32), out=dense[rows])
    labels.flush()
    dense.flush()


def _write_ids(days: list[_Day], work: Path, config: PreprocessConfig) -> tuple[int, ...]:
    random = np.random.RandomState(0)
    table_sizes = []
    with _archives(days, work) as archives:
        bar = tqdm(CAT_NAMES, "write ids", disable=not config.progress)
        for feature, column in enumerate(bar):
            frequent, num_numbers = _number_ids(days, column, config.frequency_threshold)
            size = min(num_numbers, config.max_rows)
            if config.table_sizes is not None:
                size = config.table_sizes[feature]
            table_sizes.append(size)
            hotness = config.hotness[feature]
            draws_path = work / "draws"
            draws = _draw(random, size, hotness - 1, draws_path)
            for day, archive in zip(days, archives, strict=True):
                with _array(archive, feature, "<i4", (day.num_rows, hotness)) as file:
                    for _, (ids,) in _blocks(day, (column,)):
                        numbers = _to_numbers(ids, frequent) % size
                        multi_hot = np.concatenate([numbers[:, None], draws[numbers]], axis=1)
                        file.write(multi_hot.astype("<i4").tobytes())
            del draws
            draws_path.unlink(missing_ok=True)
    return tuple(table_sizes)


def _write_raw_ids(days: list[_Day], work: Path, config: PreprocessConfig) -> tuple[int, ...]:
    with _archives(days, work) as archives:
        bar = tqdm(CAT_NAMES, "write ids", disable=not config.progress)
        for feature, column in enumerate(bar):
            hotness = config.hotness[feature]
            keys = [name_key(0, column, str(place)) for place in range(1, hotness)]
            for day, archive in zip(days, archives, strict=True):
                with _array(archive, feature, "<i8", (day.num_rows, hotness)) as file:
                    for _, (ids,) in _blocks(day, (column,)):
                        numbers = np.asarray(ids, np.int64)
                        others = [counter_bits(key, numbers).view(np.int64) for key in keys]
                        file.write(np.stack([numbers, *others], axis=1).astype("<i8").tobytes())
    return config.table_sizes or tuple(min(size, config.max_rows) for size in MLPERF_TABLE_SIZES)


@contextlib.contextmanager
def _archives(days: list[_Day], work: Path) -> Iterator[list[zipfile.ZipFile]]:
    """The archive of each day's ids, to be written."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                zipfile.ZipFile(work / f"{day.name}_sparse_multi_hot.npz", "w", zipfile.ZIP_STORED)
            )
            for day in days
        ]


@contextlib.contextmanager
def _array(
    archive: zipfile.ZipFile, feature: int, descr: str, shape: tuple[int, int]
) -> Iterator[IO[bytes]]:
    """A file in ``archive`` for the elements of an array, behind its header."""
    # With the time of writing left out, the same input gives the same bytes.
    member = zipfile.ZipInfo(f"{feature}.npy")
    with archive.open(member, "w", force_zip64=True) as file:
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        npy_format.write_array_header_1_0(file, header)
        yield file


def _number_ids(days: list[_Day], column: str, threshold: int) -> tuple[pl.DataFrame, int]:
    """The ids of a column that are frequent enough and their numbers, by id; and how many numbers
    are in use, with that of the infrequent ones."""
    seen = (
        pl.scan_parquet([day.rows_path for day in days])
        .group_by(pl.col(column).alias("id"))
        .agg(pl.col("row").min().alias("first_row"), pl.len().alias("count"))
    )
    distinct = seen.collect(engine="streaming")
    frequent = distinct.filter(pl.col("count") >= threshold).sort("first_row")
    num_numbers = frequent.height + (frequent.height < distinct.height)
    numbered = frequent.select("id", number=pl.int_range(pl.len()) + _FIRST_NUMBER)
    return numbered.sort("id"), num_numbers


def _to_numbers(ids: NDArray[np.generic], frequent: pl.DataFrame) -> NDArray[np.int64]:
    """The number of each id; that of the infrequent for an id that ``frequent`` has not."""
    known = frequent["id"].to_numpy()
    distinct, which = np.unique(ids, return_inverse=True)
    if not len(known):
        return np.full(len(ids), _INFREQUENT, np.int64)
    position = np.minimum(np.searchsorted(known, distinct), len(known) - 1)
    numbers = frequent["number"].to_numpy()[position]
    return np.where(known[position] == distinct, numbers, _INFREQUENT)[which]


def _draw(random: np.random.RandomState, size: int, width: int, path: Path) -> NDArray[np.int32]:
    """``random.randint(0, size, (size, width))``, drawn in blocks into a file and mapped."""
    if not width:
        return np.empty((size, 0), np.int32)
    draws = np.memmap(path, np.int32, "w+", shape=(size, width))
    for start in range(0, size, _BLOCK_ROWS):
        block = draws[start : start + _BLOCK_ROWS]
        block[:] = random.randint(0, size, block.shape)
    return draws


def main() -> None:
    config = tyro.cli(PreprocessConfig, description=__doc__)
    try:
        table_sizes = preprocess(config)
    except (OSError, ValueError) as error:
        sys.exit(f"preprocess: {error}")
    print(f"{config.output}: tables of {', '.join(map(str, table_sizes))} rows")


if __name__ == "__main__":
    main()
