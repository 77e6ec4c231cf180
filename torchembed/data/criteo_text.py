"""Batches from Criteo's click logs as text: Kaggle's ``train.txt`` and the days of Criteo 1TB."""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import numpy as np
import torch

from torchembed.core.features import SparseFeatures
from torchembed.data import criteo_text_rows as text
from torchembed.data.batch import Batch
from torchembed.data.criteo import CAT_NAMES, INT_NAMES
from torchembed.data.data_path import DataPath, data_path
from torchembed.data.raw_ids import MISSING_ID
from torchembed.data.source import (
    BatchSource,
    BatchTask,
    Portion,
    Split,
    check_days,
    choose_rows,
    natural_order,
    num_read,
)

_DAY_FILE = re.compile(r"day_\d+(\.txt|\.tsv)?(\.gz)?")
_TEXT_FILE = re.compile(r".*\.(txt|tsv)(\.gz)?")
_KAGGLE_FILE = re.compile(r"train\.txt(\.gz)?")


def text_files(path: DataPath) -> list[DataPath]:
    """The text files of a click log, in order.

    A folder with ``train.txt`` is Kaggle's, and that file is all (its ``test.txt`` has no labels);
    in others ``day_*`` files are taken before any ``*.txt`` or ``*.tsv``; each may end in ``.gz``.

    Raises:
        FileNotFoundError: if there is no such path, no such file in the folder, or a day between
            two others is missing.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"there is no file or folder {path}")
    files = sorted((entry for entry in path.iterdir() if entry.is_file()), key=natural_order)
    for pattern in (_KAGGLE_FILE, _DAY_FILE, _TEXT_FILE):
        if found := [file for file in files if pattern.fullmatch(file.name)]:
            if pattern is _DAY_FILE:
                check_days(found)
            return found
    names = ", ".join(file.name for file in files[:5]) or "no files"
    raise FileNotFoundError(
        f"{path} must hold train.txt, day_* or other *.txt or *.tsv files (.gz too), it has {names}"
    )


class CriteoText(BatchSource):
    """Reads rows of 40 tab-separated columns: label, 13 counts, 26 hexadecimal ids.

    Dense features are ``log(1 + count)``, with counts below 0 taken as 0; an id is its value modulo
    the table's size; a missing count or id is 0. With ``raw_ids`` an id is its value, in
    ``[0, 2**32)``, and a missing one ``torchembed.data.MISSING_ID``.

    Every rank decompresses and splits all of the text, also what was read before it goes on, and
    parses its own blocks of rows only, with polars. ``len()``, and a split that divides a file,
    take a first pass over the files that counts rows.

    Args:
        path: a file or a folder, or its URL, see :func:`text_files`; plain or gzip. Text behind a
            URL is read as a stream.
        batch_size: samples a batch on this rank.
        table_sizes: rows of all tables, or of each of the 26.
        split: which rows to read.
        held_out: part of the rows to hold out where there is one file.
        rank: this rank; the ranks take blocks of ``batch_size`` rows in turn.
        world_size: number of ranks.
        raw_ids: give ids as they stand, for dynamic tables, whose capacity ``table_sizes`` may
            then be.

    Raises:
        FileNotFoundError: if the path holds no text file, or a day between two others is
            missing.
        ImportError: while reading, where polars is not installed.
        ValueError: while reading, for a malformed row or file; names file, row, column and what
            came.
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
        raw_ids: bool = False,
    ) -> None:
        super().__init__(
            keys=CAT_NAMES,
            table_sizes=table_sizes,
            num_dense=len(INT_NAMES),
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            raw_ids=raw_ids,
        )
        self._sizes = np.array(self.table_sizes, np.int64)
        self._files = choose_rows(text_files(data_path(path)), split, held_out, text.count_rows)

    @cached_property
    def num_rows(self) -> int:  # type: ignore[override] - counted when it is asked for
        """Rows of the split, over all ranks."""
        return sum(
            (text.count_rows(path) if stop is None else stop) - start
            for path, start, stop in self._files
        )

    def __len__(self) -> int:
        return len(self._blocks(self.num_rows))

    def tasks(self, after: Sequence[Portion] = ()) -> Iterator[BatchTask]:
        blocks = text.row_blocks(self._files, self.batch_size, num_skipped=num_read(after))
        for index, block in enumerate(blocks):
            if index % self.world_size == self.rank:
                yield partial(self._batch, block)

    def _batch(self, block: list[text.TextRows]) -> Batch:
        labels, counts, ids = text.parse_block(block, MISSING_ID if self.raw_ids else 0)
        dense = np.log1p(np.maximum(counts, 0).astype(np.float32))
        if not self.raw_ids:
            ids = np.remainder(ids, self._sizes)
        sparse = SparseFeatures(
            keys=self.keys,
            values=torch.from_numpy(ids.T.ravel()),
            batch_size=len(labels),
            hotness=(1,) * len(self.keys),
        )
        return Batch(torch.from_numpy(dense), sparse, torch.from_numpy(labels))
