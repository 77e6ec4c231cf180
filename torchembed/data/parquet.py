"""Batches from Parquet files, read with pyarrow."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from torchembed.core.features import SparseFeatures
from torchembed.data.batch import Batch
from torchembed.data.criteo import CAT_NAMES, INT_NAMES
from torchembed.data.data_path import DataPath, data_path, is_remote
from torchembed.data.parquet_columns import (
    dense_column,
    dense_kind,
    id_column,
    id_kind,
    is_list,
    is_text,
)
from torchembed.data.source import (
    BatchSource,
    BatchTask,
    Portion,
    Split,
    choose_rows,
    natural_order,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile


class _Stretch(NamedTuple):
    """Rows ``[start, stop)`` of a file."""

    path: DataPath
    start: int
    stop: int


class _Rows(NamedTuple):
    """Some rows of a file."""

    path: DataPath
    first_row: int
    rows: "pa.RecordBatch"


def parquet_files(path: DataPath) -> list[DataPath]:
    """The ``*.parquet`` files of a folder in order, or the file itself.

    Raises:
        FileNotFoundError: if there are none.
    """
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.parquet"), key=natural_order)
    if not files:
        raise FileNotFoundError(f"{path} must be a Parquet file or a folder of *.parquet files")
    return files


@contextlib.contextmanager
def _open(path: DataPath) -> "Iterator[ParquetFile]":
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"{path}: reading Parquet needs pyarrow; pip install pyarrow") from error

    with contextlib.ExitStack() as stack:
        source = path
        if is_remote(path):
            # pyarrow asks for what it needs, for neighbouring columns at once.
            source = stack.enter_context(path.open("rb", cache_type="none"))
        try:
            file = stack.enter_context(parquet.ParquetFile(source))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path}: not a whole Parquet file ({error})") from error
        yield file


def _count_rows(path: DataPath) -> int:
    with _open(path) as file:
        return file.metadata.num_rows


class ParquetClicks(BatchSource):
    """Reads a label column, dense columns, and columns of ids or of lists of ids.

    Ids are integers, taken modulo the table's size; with ``raw_ids`` they are integers or texts as
    they stand, see :mod:`torchembed.data.raw_ids`, unsigned integers by their bits. Integer dense
    columns are counts and become ``log(1 + count)``, counts below 0 taken as 0; floating ones are
    taken as they are. A missing value is 0, a missing id 0 or, of ``raw_ids``, one of its own, and
    a missing list is empty. Where any column of ids holds lists, the batches are jagged. Rank r
    reads the r-th of ``world_size`` equal stretches of the rows, and of each file the row groups
    that it needs.

    Args:
        path: a file, or a folder of ``*.parquet`` files, or its URL, behind which only the columns
            that are wanted are read.
        batch_size: samples a batch on this rank.
        table_sizes: rows of all tables, or of each categorical column's.
        split: which rows to read.
        held_out: part of the rows to hold out where there is one file.
        rank: this rank.
        world_size: number of ranks.
        label: name of the label column, integers, floats or booleans.
        dense: names of the dense columns, in order.
        categorical: names of the columns of ids, in order, at least one; the batches' keys.
        raw_ids: give ids as they stand, for dynamic tables, whose capacity ``table_sizes`` may
            then be.

    Raises:
        FileNotFoundError: if there are no files.
        TypeError: if ``dense`` or ``categorical`` is a string.
        ValueError: for a damaged file, a missing column or one of another type, also than in the
            first file; while reading, for a label that is not 0 or 1. Names the file, the column
            and the row (from 1).
    """

    def __init__(
        self,
        path: DataPath | str,
        *,
        batch_size: int,
        table_sizes: int | Sequence[int],
        split: Split = Split.ALL,
        held_out: float = 0.1,
        rank: int = 0,
        world_size: int = 1,
        label: str = "label",
        dense: Sequence[str] = INT_NAMES,
        categorical: Sequence[str] = CAT_NAMES,
        raw_ids: bool = False,
    ) -> None:
        for argument, names in (("dense", dense), ("categorical", categorical)):
            if isinstance(names, str):
                raise TypeError(
                    f"{argument} must be a sequence of column names, got the string {names!r}; "
                    f"write ({names!r},)"
                )
        if not categorical:
            raise ValueError("categorical must name at least one column of ids, got none")
        super().__init__(
            keys=categorical,
            table_sizes=table_sizes,
            num_dense=len(dense),
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            raw_ids=raw_ids,
        )
        self.label, self.dense = label, tuple(dense)
        files = parquet_files(data_path(path))
        first, *others = files
        kinds = self._column_kinds(first)
        for file in others:
            _check_same_kinds(first, kinds, file, self._column_kinds(file))
        chosen = choose_rows(files, split, held_out, _count_rows)
        stretches = [
            _Stretch(file, start, _count_rows(file) if stop is None else stop)
            for file, start, stop in chosen
        ]
        self.num_rows = _num_rows(stretches)
        """Rows of the split, over all ranks."""
        if not self.num_rows:
            raise ValueError(f"{path}: has no rows in split {split.value!r}; give fuller files")
        self._stretches = stretches

    def __len__(self) -> int:
        return math.ceil(_num_rows(self._left(())) / self.batch_size)

    def tasks(self, after: Sequence[Portion] = ()) -> Iterator[BatchTask]:
        parts: list[_Rows] = []
        missing = self.batch_size
        for path, first_row, rest in self._record_batches(self._left(after)):
            while rest.num_rows:
                rows = rest.slice(0, missing)
                parts.append(_Rows(path, first_row, rows))
                rest, first_row = rest.slice(rows.num_rows), first_row + rows.num_rows
                missing -= rows.num_rows
                if not missing:
                    yield partial(self._batch, parts)
                    parts, missing = [], self.batch_size
        if parts:
            yield partial(self._batch, parts)

    def _left(self, after: Sequence[Portion]) -> list[_Stretch]:
        """This rank's rows but those that were read: where the number of ranks changes, what all
        of them have left is divided anew."""
        parts = [self._stretches]
        for world_size, batch_size, num_batches in (*after, Portion(self.world_size, 0, 0)):
            if len(parts) != world_size:
                left = [stretch for part in parts for stretch in part]
                parts = [_part_of(left, rank, world_size) for rank in range(world_size)]
            parts = [_rows_between(part, batch_size * num_batches, None) for part in parts]
        return parts[self.rank]

    def _record_batches(self, stretches: list[_Stretch]) -> Iterator[_Rows]:
        """The rows of ``stretches`` as record batches, each with its file and first row there."""
        columns = [self.label, *self.dense, *self.keys]
        for path, start, stop in stretches:
            with _open(path) as file:
                row = 0
                for group in range(file.num_row_groups):
                    group_end = row + file.metadata.row_group(group).num_rows
                    if group_end <= start or row >= stop:
                        row = group_end
                        continue
                    for rows in _read_group(file, path, group, self.batch_size, columns):
                        skipped = min(max(start - row, 0), rows.num_rows)
                        wanted = rows.slice(skipped, max(stop - row - skipped, 0))
                        if wanted.num_rows:
                            yield _Rows(path, row + skipped, wanted)
                        row += rows.num_rows
                        if row >= stop:
                            break

    def _column_kinds(self, path: DataPath) -> dict[str, str]:
        """In words what decides how each dense column and each column of ids is read.

        Raises:
            ValueError: for a missing column or one of another type.
        """
        with _open(path) as file:
            schema = file.schema_arrow
        import pyarrow.types as types

        wanted = (self.label, *self.dense, *self.keys)
        missing = [name for name in wanted if name not in schema.names]
        if missing:
            raise ValueError(
                f"{path}: has no column {', '.join(missing)}, only {', '.join(schema.names)}; "
                "name the columns with label, dense and categorical"
            )
        if repeated := [name for name in wanted if schema.names.count(name) > 1]:
            raise ValueError(
                f"{path}: has more than one column {', '.join(repeated)}; rename all but one"
            )

        def is_number(kind: "pa.DataType") -> bool:
            return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)

        def is_ids(kind: "pa.DataType") -> bool:
            kind = kind.value_type if is_list(kind) else kind
            return types.is_integer(kind) or (self.raw_ids and is_text(kind))

        ids = "integers or lists of integers", "hash or number its values first, or give raw_ids"
        if self.raw_ids:
            ids = "integers, texts or lists of them", "cast it"
        for names, fits, (required, advice) in (
            ((self.label, *self.dense), is_number, ("numbers", "cast it")),
            (self.keys, is_ids, ids),
        ):
            for name in names:
                if not fits(kind := schema.field(name).type):
                    raise ValueError(
                        f"{path}: column {name} must hold {required}, got {kind}; {advice}"
                    )
        of_dense = {name: dense_kind(schema.field(name).type) for name in self.dense}
        return of_dense | {name: id_kind(schema.field(name).type) for name in self.keys}

    def _batch(self, parts: list[_Rows]) -> Batch:
        labels = np.concatenate([self._labels(*part) for part in parts])
        dense = np.empty((len(labels), self.num_dense), np.float32)
        for number, name in enumerate(self.dense):
            dense[:, number] = np.concatenate(list(map(dense_column, _columns(parts, name))))
        ids: list[NDArray[np.int64]] = []
        lengths: list[NDArray[np.int64] | None] = []
        for name, size in zip(self.keys, self.table_sizes, strict=True):
            read = [
                id_column(column, None if self.raw_ids else size)
                for column in _columns(parts, name)
            ]
            ids.append(np.concatenate([found for found, _ in read]))
            counts = [found for _, found in read if found is not None]
            lengths.append(np.concatenate(counts) if counts else None)
        jagged = any(column is not None for column in lengths)
        offsets = None
        if jagged:
            ones = np.ones(len(labels), np.int64)
            every = [ones if column is None else column for column in lengths]
            offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(every))]))
        sparse = SparseFeatures(
            keys=self.keys,
            values=torch.from_numpy(np.concatenate(ids)),
            batch_size=len(labels),
            offsets=offsets,
            hotness=None if jagged else (1,) * len(self.keys),
        )
        return Batch(torch.from_numpy(dense), sparse, torch.from_numpy(labels))

    def _labels(
        self, path: DataPath, first_row: int, rows: "pa.RecordBatch"
    ) -> NDArray[np.float32]:
        column = rows.column(self.label)
        labels = column.cast("float32", safe=False).to_numpy(zero_copy_only=False)
        bad = (labels != 0) & (labels != 1)
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(
                f"{path}, row {first_row + row + 1}, column {self.label}: must be 0 or 1, "
                f"got {column[row]}"
            )
        return labels


def _num_rows(stretches: list[_Stretch]) -> int:
    return sum(stop - start for _, start, stop in stretches)


def _part_of(stretches: list[_Stretch], rank: int, world_size: int) -> list[_Stretch]:
    """The ``rank``-th of ``world_size`` equal parts of the rows of ``stretches``."""
    num_rows = _num_rows(stretches)
    return _rows_between(
        stretches, num_rows * rank // world_size, num_rows * (rank + 1) // world_size
    )


def _rows_between(stretches: list[_Stretch], begin: int, end: int | None) -> list[_Stretch]:
    """Rows ``[begin, end)`` of those of ``stretches``, to the last where ``end`` is None."""
    end = _num_rows(stretches) if end is None else end
    part, row = [], 0
    for path, start, stop in stretches:
        first, last = max(begin - row, 0), min(end - row, stop - start)
        if first < last:
            part.append(_Stretch(path, start + first, start + last))
        row += stop - start
    return part


def _read_group(
    file: "ParquetFile", path: DataPath, group: int, batch_size: int, columns: list[str]
) -> "Iterator[pa.RecordBatch]":
    import pyarrow as pa

    try:
        yield from file.iter_batches(
            batch_size, row_groups=[group], columns=columns, use_threads=False
        )
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: row group {group} is damaged ({error})") from error


def _columns(parts: list[_Rows], name: str) -> "Iterator[pa.ChunkedArray]":
    """Column ``name`` of ``parts``, those of one type as one: files may differ in its width."""
    import pyarrow as pa

    columns = (part.rows.column(name) for part in parts)
    for _, of_type in itertools.groupby(columns, lambda column: column.type):
        yield pa.chunked_array(list(of_type))


def _check_same_kinds(
    first: DataPath, of_first: dict[str, str], path: DataPath, of_path: dict[str, str]
) -> None:
    """Raise ``ValueError`` where a column would be read in another way than that of ``first``."""
    for name, kind in of_path.items():
        if kind != of_first[name]:
            raise ValueError(
                f"{path}: column {name} must hold {of_first[name]}, as in {first}, got {kind}; "
                "write it as one type in all files"
            )
