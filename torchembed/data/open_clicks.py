"""One door to the readers."""

from collections.abc import Sequence

from torchembed.data.criteo_text import CriteoText
from torchembed.data.data_path import DataPath, data_path
from torchembed.data.mlperf import MlperfDays, mlperf_days
from torchembed.data.mlperf_tables import TABLES_FILE
from torchembed.data.parquet import ParquetClicks
from torchembed.data.source import BatchSource, Split


def open_clicks(
    path: DataPath | str,
    *,
    batch_size: int,
    table_sizes: int | Sequence[int],
    split: Split = Split.ALL,
    held_out: float = 0.1,
    rank: int = 0,
    world_size: int = 1,
    raw_ids: bool = False,
) -> BatchSource:
    """The reader for what is at ``path``: MLPerf's files, Parquet, or Criteo text.

    The batches' features are ``keys`` of the result, its tables' sizes ``table_sizes``, which are
    those of the folder itself where it says them.

    Args:
        path: a folder that holds ``day_*_dense.npy``, ``*.parquet`` or text files, or a single
            Parquet or text file; or a URL of one that fsspec knows.
        batch_size: samples a batch on this rank.
        table_sizes: rows of all tables, or of each; ids are taken modulo these, unless they are
            raw.
        split: which rows to read.
        held_out: part of the rows to hold out where there is one file.
        rank: this rank.
        world_size: number of ranks.
        raw_ids: give the data's own 64-bit ids, see :mod:`torchembed.data.raw_ids`.

    Raises:
        FileNotFoundError: if there is nothing to read.
        ValueError: as the readers do.
    """
    path = data_path(path)
    rows = {
        "batch_size": batch_size,
        "split": split,
        "held_out": held_out,
        "rank": rank,
        "world_size": world_size,
        "raw_ids": raw_ids,
    }
    if path.is_dir() and mlperf_days(path):
        known = (path / TABLES_FILE).is_file()
        return MlperfDays(path, table_sizes=None if known else table_sizes, **rows)
    if path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet"))):
        return ParquetClicks(path, table_sizes=table_sizes, **rows)
    return CriteoText(path, table_sizes=table_sizes, **rows)
