"""What tables on disk need room for: checked before their rows are written, which takes long."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from bench.data import dlrm_dcnv2 as workload
from torchembed import Disk
from torchembed.data import Batch
from torchembed.stores.rocksdb.opening import import_rocksdict

_STATE_COLUMNS = {"rowwise_adagrad": 1, "adagrad": workload.DIM}


def check_disk(folder: Path, optimizer: str, max_rows: int) -> None:
    """Raise unless all rows can be written into ``folder``, and make it.

    Raises:
        FileNotFoundError: where the folder that is to hold it is missing.
        ImportError: where rocksdict is not installed.
        OSError: where it cannot be made, or its disk has no room for the rows.
    """
    import_rocksdict()
    if not folder.absolute().parent.is_dir():
        raise FileNotFoundError(
            f"--disk must be a folder, or a new one in a folder that exists, got {folder}; make "
            f"{folder.absolute().parent}"
        )
    folder.mkdir(exist_ok=True)
    num_rows = sum(workload.table_sizes(max_rows))
    row_bytes = (workload.DIM + _STATE_COLUMNS[optimizer]) * torch.float32.itemsize
    free = shutil.disk_usage(folder).free
    if num_rows * row_bytes > free:
        raise OSError(
            f"--disk names {folder}, where {free / 1e9:.1f} GB are free, and {num_rows} rows of "
            f"{row_bytes} bytes take {num_rows * row_bytes / 1e9:.1f} GB; lower --max-rows from "
            f"{max_rows}, or name a larger disk"
        )


def check_caches(storage: Disk, batches: Iterable[Batch], max_rows: int) -> None:
    """Raise ``ValueError`` where the memory above a disk cannot hold the rows of a batch.

    Args:
        storage: of each table, with sizes in rows.
        batches: of :func:`bench.data.dlrm_dcnv2.make_batch`.
        max_rows: that tables are cut to.
    """
    sizes = workload.table_sizes(max_rows)
    cached, in_host = (
        sum(min(rows or 0, size) for size in sizes)
        for rows in (storage.cache_rows, storage.host_rows)
    )
    needed = max(_num_rows(batch) for batch in batches)
    if needed > cached:
        raise ValueError(
            f"parts must give room for the {needed} rows of a batch, got a cache of {cached} rows; "
            "raise --parts, or lower --batch-sizes"
        )
    if in_host < min(cached + needed, sum(sizes)):
        raise ValueError(
            f"host_times must give room for the {cached} rows of the cache and the {needed} of a "
            f"batch, got {in_host} rows in host memory; raise --host-times, or lower --batch-sizes"
        )


def _num_rows(batch: Batch) -> int:
    """Distinct rows that a batch looks up, of all tables."""
    counts = [count * batch.sparse.batch_size for count in workload.HOTNESS]
    return sum(len(ids.unique()) for ids in batch.sparse.values.split(counts))
