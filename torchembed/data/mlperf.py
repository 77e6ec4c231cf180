"""Batches from MLPerf's preprocessed Criteo 1TB: three arrays a day, read where they lie."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from torchembed.core.features import SparseFeatures
from torchembed.data.batch import Batch
from torchembed.data.batch_memory import empty
from torchembed.data.criteo import CAT_NAMES, INT_NAMES, MLPERF_TABLE_SIZES
from torchembed.data.data_path import DataPath, data_path
from torchembed.data.mapped_npz import StoredArray, map_npy, map_npz, read_arrays
from torchembed.data.mlperf_tables import TABLES_FILE, Tables, read_tables
from torchembed.data.source import (
    BatchSource,
    BatchTask,
    Portion,
    Split,
    check_days,
    choose_rows,
    natural_order,
)

_ID_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
_DAY_FILE = re.compile(r"(day_\d+)_(dense\.npy|labels\.npy|sparse_multi_hot\.npz)")


class _Day(NamedTuple):
    """Rows of one day, not yet read."""

    path: DataPath
    """Its files' names begin with this."""
    first_row: int
    dense: StoredArray
    labels: StoredArray
    """``[rows]`` or ``[rows, 1]``."""
    sparse: list[StoredArray]

    def slice(self, start: int, stop: int) -> "_Day":
        return _Day(
            self.path,
            self.first_row + start,
            self.dense[start:stop],
            self.labels[start:stop],
            [column[start:stop] for column in self.sparse],
        )

    def read(self) -> "_DayRows":
        """These rows' numbers; of mapped files, views of them."""
        dense, labels, *sparse = read_arrays([self.dense, self.labels, *self.sparse])
        return _DayRows(self.path, self.first_row, dense, labels.reshape(-1), sparse)


class _DayRows(NamedTuple):
    """Rows of one day."""

    path: DataPath
    first_row: int
    dense: NDArray[np.float32]
    labels: NDArray[Any]
    sparse: list[NDArray[Any]]


def mlperf_days(folder: DataPath) -> list[DataPath]:
    """``folder/day_0``, ``folder/day_1``, ...: how the names of each day's files begin.

    A day counts where any of its three files is there; empty where the folder has none.

    Raises:
        FileNotFoundError: if a day between two others is missing.
    """
    matches = (_DAY_FILE.fullmatch(path.name) for path in folder.iterdir())
    days = {folder / match[1] for match in matches if match is not None}
    paths = sorted(days, key=natural_order)
    check_days(paths)
    return paths


class MlperfDays(BatchSource):
    """Reads ``day_{i}_dense.npy``, ``day_{i}_labels.npy`` and ``day_{i}_sparse_multi_hot.npz``.

    Dense features are float32 ``[rows, 13]`` and already logarithms, and are taken as they are;
    labels are ``[rows]`` or ``[rows, 1]``; the archive holds an int32 ``[rows, hotness]`` for each
    of the 26 features, named "0" to "25", or an int64 one, as ids that were not numbered need. Ids
    are taken modulo the table's size, as MLPerf's reference does, which changes nothing in files
    made for these sizes; with ``raw_ids`` any int64 is an id, and they are given as they stand. The
    days are numbered without gaps. Held out is the last day; validation and test are its halves.

    Args:
        folder: where the files are, or its URL, behind which only the rows of a batch are read.
        batch_size: samples a batch on this rank.
        table_sizes: rows of all tables, or of each; where None, those of ``tables.json`` in the
            folder, and MLPerf's where that is not there.
        split: which rows to read.
        held_out: part of the rows to hold out where there is one day.
        rank: this rank; the ranks take blocks of ``batch_size`` rows in turn.
        world_size: number of ranks.
        raw_ids: give ids as they stand, for dynamic tables, whose capacity ``table_sizes`` may
            then be.

    Raises:
        FileNotFoundError: if the folder has no days, or lacks a day or a file of one.
        ValueError: if a file is cut off, has other columns, or does not fit the others or
            ``tables.json``; while reading, where a label is not 0 or 1 or an id is negative. Names
            the file, the row (from 1) and what came.
    """

    def __init__(
        self,
        folder: DataPath | str,
        *,
        batch_size: int,
        table_sizes: int | Sequence[int] | None = None,
        split: Split = Split.ALL,
        held_out: float = 0.1,
        rank: int = 0,
        world_size: int = 1,
        raw_ids: bool = False,
    ) -> None:
        folder = data_path(folder)
        if not folder.is_dir() or not (paths := mlperf_days(folder)):
            raise FileNotFoundError(f"{folder} must be a folder that holds day_0_dense.npy, ...")
        days = {path: _open_day(path) for path in paths}
        tables = read_tables(folder)
        self.hotness = _hotness(days, tables)
        known_sizes = MLPERF_TABLE_SIZES if tables is None else tables.sizes
        super().__init__(
            keys=CAT_NAMES,
            table_sizes=known_sizes if table_sizes is None else table_sizes,
            num_dense=len(INT_NAMES),
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            raw_ids=raw_ids,
        )
        are_wide = any(ids.dtype == np.int64 for day in days.values() for ids in day.sparse)
        # One for all days, so that no batch differs from the one before.
        self._ids_dtype = torch.int64 if are_wide else torch.int32
        self._features = range(len(self.hotness))
        self._first_ids = np.cumsum((0, *self.hotness[:-1]))
        """The position of each feature's first id in a batch of one sample."""
        largest = 1 << (63 if are_wide else 31)
        self._limits = np.array([min(size, largest) for size in self.table_sizes], np.uint64)
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
        slices, start = [], first_row
        stop = min(first_row + self.batch_size, self.num_rows)
        for day in self._days:
            if start < len(day.dense) and stop > 0:
                slices.append(day.slice(max(start, 0), stop))
            start, stop = start - len(day.dense), stop - len(day.dense)
        parts = [day.read() for day in slices]
        num_samples = sum(len(part.dense) for part in parts)
        labels = empty([num_samples], torch.float32)
        np.concatenate([_read_labels(part) for part in parts], out=labels.numpy())
        dense = empty([num_samples, self.num_dense], torch.float32)
        np.concatenate([part.dense for part in parts], out=dense.numpy())
        values = empty([sum(self.hotness) * num_samples], self._ids_dtype)
        ids = values.numpy()
        # Few calls for all features, since each takes Python's lock from the threads that build
        # other batches.
        columns = [part.sparse[feature].ravel() for feature in self._features for part in parts]
        np.concatenate(columns, out=ids)
        if not self.raw_ids:
            self._bound(ids, parts, num_samples)
        sparse = SparseFeatures(
            keys=self.keys, values=values, batch_size=num_samples, hotness=self.hotness
        )
        return Batch(dense, sparse, labels)

    def _bound(self, ids: NDArray[Any], parts: Sequence[_DayRows], num_samples: int) -> None:
        """Take ``ids`` modulo their tables' sizes, in place; an error names a negative one."""
        begins = self._first_ids * num_samples
        # The largest are found far faster than all are divided. Negative ids, read as unsigned,
        # are the largest of all, so that one pass finds both.
        largest = np.maximum.reduceat(ids.view(f"u{ids.itemsize}"), begins)
        for feature in np.flatnonzero(largest >= self._limits).tolist():
            end = begins[feature] + self.hotness[feature] * num_samples
            of_feature = ids[begins[feature] : end]
            if of_feature.min() < 0:
                _raise_negative_id(parts, feature)
            of_feature %= self.table_sizes[feature]


def _hotness(days: Mapping[DataPath, _Day], tables: Tables | None) -> tuple[int, ...]:
    """Ids a sample of each feature, which are the same on all days and in ``tables.json``."""
    found = {path: tuple(ids.shape[1] for ids in day.sparse) for path, day in days.items()}
    first, hotness = next(iter(found.items()))
    where = f"{_sparse_path(first)} has"
    if tables is not None and tables.hotness is not None:
        where, hotness = f"{first.parent / TABLES_FILE} says", tables.hotness
    for path, other in found.items():
        if other != hotness:
            raise ValueError(
                f"{_sparse_path(path)}: must have the hotness that {where}, {list(hotness)}, "
                f"got {list(other)}; preprocess all days together"
            )
    return hotness


def _read_labels(day: _DayRows) -> NDArray[np.float32]:
    labels = day.labels.astype(np.float32)
    bad = (labels != 0) & (labels != 1)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"{_labels_path(day.path)}, row {day.first_row + row + 1}: a label must be 0 or 1, "
            f"got {day.labels[row]}"
        )
    return labels


def _raise_negative_id(parts: Sequence[_DayRows], feature: int) -> NoReturn:
    """Name the first negative id of ``feature``, of which ``parts`` have one at least."""
    day = next(part for part in parts if part.sparse[feature].min(initial=0) < 0)
    row = int((day.sparse[feature] < 0).any(axis=1).argmax())
    raise ValueError(
        f"{_sparse_path(day.path)}, array {feature}, row {day.first_row + row + 1}: ids must not "
        f"be negative, got {day.sparse[feature][row].tolist()}; preprocess the day again"
    )


def _dense_path(day: DataPath) -> DataPath:
    return day.with_name(f"{day.name}_dense.npy")


def _labels_path(day: DataPath) -> DataPath:
    return day.with_name(f"{day.name}_labels.npy")


def _sparse_path(day: DataPath) -> DataPath:
    return day.with_name(f"{day.name}_sparse_multi_hot.npz")


def _open_day(day: DataPath) -> _Day:
    dense_path, labels_path, sparse_path = _dense_path(day), _labels_path(day), _sparse_path(day)
    for path in (dense_path, labels_path, sparse_path):
        if not path.is_file():
            raise FileNotFoundError(
                f"{day.parent}: {day.name} lacks {path.name}; write the day again, or move its "
                "other files away"
            )
    dense, labels, archive = map_npy(dense_path), map_npy(labels_path), map_npz(sparse_path)
    num_rows = len(dense) if dense.ndim else 0
    if dense.shape != (num_rows, len(INT_NAMES)) or dense.dtype != np.float32:
        _raise_bad_array(dense_path, f"float32 [rows, {len(INT_NAMES)}]", dense)
    if labels.shape not in ((num_rows,), (num_rows, 1)):
        required = f"[{num_rows}] or [{num_rows}, 1], the rows of {dense_path.name}"
        _raise_bad_array(labels_path, required, labels)
    names = [str(feature) for feature in range(len(CAT_NAMES))]
    if set(names) != set(archive):
        raise ValueError(
            f"{sparse_path}: must hold {len(names)} arrays, {names[0]} to {names[-1]}, one for "
            f"each feature, got {len(archive)}: {', '.join(archive) or 'none'}; preprocess the day "
            "again"
        )
    for name in names:
        ids = archive[name]
        if ids.ndim != 2 or len(ids) != num_rows or not ids.shape[1] or ids.dtype not in _ID_DTYPES:
            required = f"int32 or int64 [{num_rows}, hotness], with the rows of {dense_path.name}"
            _raise_bad_array(f"{sparse_path}, array {name}", required, ids)
    return _Day(day, 0, dense, labels, [archive[name] for name in names])


def _raise_bad_array(where: DataPath | str, required: str, array: StoredArray) -> NoReturn:
    raise ValueError(
        f"{where}: must be {required}, got {array.dtype} {list(array.shape)}; preprocess the day "
        "again"
    )
