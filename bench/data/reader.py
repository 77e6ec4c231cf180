"""Rate at which readers make batches: MLPerf's binary days, Parquet and Criteo's text.

``python -m bench.data.reader`` writes random rows in each format and prints rows and GB of batches
a second (what a step copies to its GPU), through ``BackgroundLoader``. Passes after the first are
timed: files are in the system's cache then. A figure is printed only if labels and ids of the first
pass sum up to what was written.
"""

import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from bench.report.result_file import Row, write_results
from torchembed.core.trees import tensors_in
from torchembed.data import (
    CAT_NAMES,
    INT_NAMES,
    MLPERF_HOTNESS,
    MLPERF_TABLE_SIZES,
    BackgroundLoader,
    Batch,
    BatchSource,
    CriteoText,
    MlperfDays,
    ParquetClicks,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Files to read, and how long."""

    num_rows: int = 1 << 20
    """Rows of MLPerf's files; the others, which take longer to write, have fewer."""
    batch_size: int = 8192
    num_threads: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Threads that build batches; more than there are processors for are left out."""
    seconds: float = 1.0
    """Passes are repeated for as long."""
    folder: Path | None = None
    """Folder to write the files to; a temporary one where None."""
    output: Path | None = None
    """JSON to write the rows to."""


class Rows(NamedTuple):
    """Contents of the files."""

    labels: NDArray[np.int32]
    counts: NDArray[np.int32]
    """``[rows, 13]``."""
    ids: list[NDArray[np.int32]]
    """``[rows, hotness]`` of each feature."""

    def first(self, num_rows: int) -> "Rows":
        """The first ``num_rows`` of them."""
        ids = [of_feature[:num_rows] for of_feature in self.ids]
        return Rows(self.labels[:num_rows], self.counts[:num_rows], ids)

    def total(self, hotness: Iterable[int]) -> tuple[int, int]:
        """The sums of labels, and of the first ``hotness`` ids of each feature."""
        ids = zip(self.ids, hotness, strict=True)
        return int(self.labels.sum()), sum(int(i[:, :h].sum(dtype=np.int64)) for i, h in ids)


def random_rows(num_rows: int) -> Rows:
    generator = np.random.default_rng(0)
    return Rows(
        generator.integers(0, 2, num_rows, dtype=np.int32),
        generator.integers(0, 1000, (num_rows, len(INT_NAMES)), dtype=np.int32),
        [
            generator.integers(0, size, (num_rows, count), dtype=np.int32)
            for size, count in zip(MLPERF_TABLE_SIZES, MLPERF_HOTNESS, strict=True)
        ],
    )


def write_mlperf(rows: Rows, folder: Path) -> None:
    np.save(folder / "day_0_dense.npy", np.log1p(rows.counts.astype(np.float32)))
    np.save(folder / "day_0_labels.npy", rows.labels)
    arrays: Any = {str(number): ids for number, ids in enumerate(rows.ids)}
    np.savez(folder / "day_0_sparse_multi_hot.npz", **arrays)


def write_parquet(rows: Rows, folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    columns = {"label": rows.labels}
    columns |= dict(zip(INT_NAMES, rows.counts.T, strict=True))
    columns |= {name: ids[:, 0] for name, ids in zip(CAT_NAMES, rows.ids, strict=True)}
    parquet.write_table(pa.table(columns), folder / "day_0.parquet", row_group_size=1 << 16)


def write_text(rows: Rows, folder: Path) -> None:
    ids = np.stack([of_feature[:, 0] for of_feature in rows.ids], axis=1)
    with (folder / "day_0").open("w") as file:
        for label, counts, row in zip(rows.labels, rows.counts, ids.tolist(), strict=True):
            cells = [label, *counts, *(f"{value:08x}" for value in row)]
            file.write("\t".join(map(str, cells)) + "\n")


class Format(NamedTuple):
    """Writer and reader of a format."""

    write: Callable[[Rows, Path], None]
    reader: Callable[..., BatchSource]
    hotness: tuple[int, ...]
    """Ids that there are of each feature."""
    part: float
    """Part of the rows that is written."""


ONES = (1,) * len(MLPERF_HOTNESS)
FORMATS = {
    "mlperf": Format(write_mlperf, MlperfDays, MLPERF_HOTNESS, 1.0),
    "parquet": Format(write_parquet, ParquetClicks, ONES, 0.25),
    "text": Format(write_text, CriteoText, ONES, 0.125),
}


def measure(
    name: str, rows: Rows, folder: Path, num_threads: int, batch_size: int, seconds: float
) -> Row:
    """Passes over the files for ``seconds``, one at least, after a first one that is checked."""
    source = FORMATS[name].reader(folder, batch_size=batch_size, table_sizes=MLPERF_TABLE_SIZES)
    # A thread builds one batch while the one before waits for the consumer.
    loader = BackgroundLoader(source, num_threads=num_threads, num_ahead=2 * num_threads)
    with loader:
        found = torch.zeros(2, dtype=torch.int64)
        for batch in loader:
            found += torch.stack([batch.labels.sum().long(), batch.sparse.values.sum()])
        expected = rows.total(FORMATS[name].hotness)
        if tuple(found.tolist()) != expected:
            raise AssertionError(f"{name}: labels and ids sum up to {found.tolist()}, {expected=}")
        start, taken, num_bytes, num_passes = time.perf_counter(), 0.0, 0, 0
        while num_passes == 0 or taken < seconds:
            num_bytes += sum(map(batch_bytes, loader))
            num_passes += 1
            taken = time.perf_counter() - start
    file_bytes = sum(file.stat().st_size for file in folder.iterdir())
    return {
        "bench": "reader",
        "system": "torchembed",
        "format": name,
        "num_threads": num_threads,
        "batch_per_gpu": batch_size,
        "pinned": loader.pin_memory,
        "samples_per_second": num_passes * len(rows.labels) / taken,
        "bytes_per_second": num_bytes / taken,
        "file_bytes_per_second": num_passes * file_bytes / taken,
    }


def batch_bytes(batch: Batch) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    all_rows, results = random_rows(config.num_rows), []
    num_processors = len(os.sched_getaffinity(0))
    print("format   threads    rows/s  batches GB/s  files GB/s")
    with tempfile.TemporaryDirectory(dir=config.folder) as folder:
        for name, of_format in FORMATS.items():
            files = Path(folder) / name
            files.mkdir()
            rows = all_rows.first(max(int(of_format.part * config.num_rows), 1))
            of_format.write(rows, files)
            for num_threads in config.num_threads:
                if num_threads > num_processors:
                    continue
                row = measure(name, rows, files, num_threads, config.batch_size, config.seconds)
                results.append(row)
                print(
                    f"{name:8} {num_threads:7d} {row['samples_per_second']:9.0f}"
                    f" {row['bytes_per_second'] / 1e9:13.2f}"
                    f" {row['file_bytes_per_second'] / 1e9:11.2f}",
                    flush=True,
                )
                if config.output is not None:
                    write_results(config.output, results)
            shutil.rmtree(files)


if __name__ == "__main__":
    main()
