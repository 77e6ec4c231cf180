"""Batches from MLPerf's preprocessed Criteo 1TB: three arrays a day, mapped into memory."""

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from torchembed.core.features import SparseFeatures
from torchembed.data.batch import Batch
from torchembed.data.batch_memory import empty
from torchembed.data.criteo import MLPERF_TABLE_SIZES
from torchembed.data.mapped_npz import map_npy, map_npz
from torchembed.data.source import (
    BatchSource,
    BatchTask,
    Portion,
    Split,
    choose_rows,
    natural_order,
)

TABLES_FILE = "tables.json"
"""What the preprocessing writes beside the days: the tables' sizes and the hotness of each."""
_DENSE_FILE = re.compile(r"day_\d+_dense\.npy")


class _Day(NamedTuple):
    """Rows of one day, not yet read."""

    labels_path: Path
    first_row: int
    dense: NDArray[np.float32]
    labels: NDArray[Any]
    sparse: list[NDArray[np.int32]]

    def slice(self, start: int, stop: int) -> "_Day":
        return _Day(
            self.labels_path,
            self.first_row + start,
            self.dense[start:stop],
            self.labels[start:stop],
            [column[start:stop] for column in self.sparse],
        )


def mlperf_days(folder: Path) -> list[Path]:
    """The ``day_*_dense.npy`` files of ``folder``, by day; empty where it has none."""
    files = (path for path in folder.iterdir() if _DENSE_FILE.fullmatch(path.name))
    return sorted(files, key=natural_order)


def _table_sizes(folder: Path, num_features: int) -> Sequence[int]:
    path = folder / TABLES_FILE
    if path.is_file():
        return json.loads(path.read_text())["table_sizes"]
    if num_features == len(MLPERF_TABLE_SIZES):
        return MLPERF_TABLE_SIZES
    raise ValueError(f"give table_sizes: {folder} has no {TABLES_FILE}, and is not MLPerf's data")


class MlperfDays(BatchSource):
    """Reads ``day_{i}_dense.npy``, ``day_{i}_labels.npy`` and ``day_{i}_sparse_multi_hot.npz``.

    Dense features are float32 ``[rows, 13]`` and already logarithms, and are taken as they are;
    labels are ``[rows]`` or ``[rows, 1]``; the archive holds an int32 ``[rows, hotness]`` for each
    feature, named "0", "1", .... Ids are taken modulo the table's size, as MLPerf's reference does,
    which changes nothing in files made for these sizes. Held out is the last day; validation and
    test are its halves.

    Args:
        folder: where the files are.
        batch_size: samples a batch on this rank.
        table_sizes: rows of all tables, or of each; where None, those of ``tables.json`` in the
            folder, and MLPerf's where that is not there.
        split: which rows to read.
        held_out: part of the rows to hold out where there is one day.
        rank: this rank; the ranks take blocks of ``batch_size`` rows in turn.
        world_size: number of ranks.

    Raises:
        FileNotFoundError: where the folder has no days, or a day lacks a file.
        ValueError: where a file is cut off, or the three of a day do not fit together; while
            reading, where a label is not 0 or 1.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        batch_size: int,
        table_sizes: int | Sequence[int] | None = None,
        split: Split = Split.ALL,
        held_out: float = 0.1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        folder = Path(folder)
        if not folder.is_dir() or not (paths := mlperf_days(folder)):
            raise FileNotFoundError(f"{folder} must be a folder that holds day_0_dense.npy, ...")
        days = {path: _open_day(path) for path in paths}
        shapes = {
            (day.dense.shape[1], *(column.shape[1] for column in day.sparse))
            for day in days.values()
        }
        if len(shapes) != 1:
            raise ValueError(f"{folder}: the days differ in their columns or hotness: {shapes}")
        num_dense, *hotness = shapes.pop()
        super().__init__(
            keys=[f"cat_{feature}" for feature in range(len(hotness))],
            table_sizes=_table_sizes(folder, len(hotness)) if table_sizes is None else table_sizes,
            num_dense=num_dense,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
        )
        self.hotness = tuple(hotness)
        chosen = choose_rows(paths, split, held_out, lambda path: len(days[path].dense))
        self._days = [
            days[path].slice(start, len(days[path].dense) if stop is None else stop)
            for path, start, stop in chosen
        ]
        self.num_rows = sum(len(day.dense) for day in self._days)
        """Rows of the split, over all ranks."""
        if not self.num_rows:
            raise ValueError(f"{folder}: has no rows in split {split.value!r}; give fuller files")

    def __len__(self) -> int:
        return len(self._blocks(self.num_rows))

    def tasks(self, after: Sequence[Portion] = ()) -> Iterator[BatchTask]:
        return (partial(self._batch, first_row) for first_row in self._blocks(self.num_rows, after))

    def _batch(self, first_row: int) -> Batch:
        parts, start = [], first_row
        stop = min(first_row + self.batch_size, self.num_rows)
        for day in self._days:
            if start < len(day.dense) and stop > 0:
                parts.append(day.slice(max(start, 0), stop))
            start, stop = start - len(day.dense), stop - len(day.dense)
        num_samples = sum(len(part.dense) for part in parts)
        labels = empty([num_samples], torch.float32)
        np.concatenate([_read_labels(part) for part in parts], out=labels.numpy())
        dense = empty([num_samples, self.num_dense], torch.float32)
        np.concatenate([part.dense for part in parts], out=dense.numpy())
        values = empty([sum(self.hotness) * num_samples], torch.int32)
        array, begin = values.numpy(), 0
        for feature, size in enumerate(self.table_sizes):
            end = begin + self.hotness[feature] * num_samples
            ids = array[begin:end]
            np.concatenate([part.sparse[feature].ravel() for part in parts], out=ids)
            # The largest is found far faster than all are divided.
            if ids.max() >= size:
                ids %= size
            begin = end
        sparse = SparseFeatures(
            keys=self.keys, values=values, batch_size=num_samples, hotness=self.hotness
        )
        return Batch(dense, sparse, labels)


def _read_labels(day: _Day) -> NDArray[np.float32]:
    labels = day.labels.astype(np.float32)
    bad = (labels != 0) & (labels != 1)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"{day.labels_path}, row {day.first_row + row + 1}: a label must be 0 or 1, "
            f"got {day.labels[row]}"
        )
    return labels


def _open_day(dense_path: Path) -> _Day:
    stem = dense_path.name.removesuffix("_dense.npy")
    labels_path = dense_path.with_name(f"{stem}_labels.npy")
    sparse_path = dense_path.with_name(f"{stem}_sparse_multi_hot.npz")
    for path in (labels_path, sparse_path):
        if not path.is_file():
            raise FileNotFoundError(f"{dense_path.parent}: {stem} lacks {path.name}")
    dense, labels, archive = map_npy(dense_path), map_npy(labels_path), map_npz(sparse_path)
    num_rows = len(dense) if dense.ndim else 0
    if dense.ndim != 2 or dense.dtype != np.float32:
        _raise_bad_array(dense_path, "float32 [rows, num_dense]", dense)
    if labels.shape not in ((num_rows,), (num_rows, 1)):
        required = f"[{num_rows}] or [{num_rows}, 1], the rows of {dense_path.name}"
        _raise_bad_array(labels_path, required, labels)
    names = [str(feature) for feature in range(len(archive))]
    if set(names) != set(archive) or not names:
        raise ValueError(
            f"{sparse_path}: must hold the arrays 0, 1, ... one for each feature, "
            f"has {', '.join(archive) or 'none'}"
        )
    for name in names:
        ids = archive[name]
        if ids.ndim != 2 or len(ids) != num_rows or not ids.shape[1] or ids.dtype != np.int32:
            required = f"int32 [{num_rows}, hotness], with the rows of {dense_path.name}"
            _raise_bad_array(f"{sparse_path}, array {name}", required, ids)
    return _Day(labels_path, 0, dense, labels.reshape(-1), [archive[name] for name in names])


def _raise_bad_array(where: Path | str, required: str, array: NDArray[Any]) -> None:
    raise ValueError(f"{where}: must be {required}, got {array.dtype} {list(array.shape)}")
