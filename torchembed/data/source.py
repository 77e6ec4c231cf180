"""The base of all readers: an iterable of batches, cut into tasks that any thread can run."""

import enum
import itertools
import numbers
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from torchembed.data.batch import Batch
from torchembed.data.data_path import DataPath

BatchTask = Callable[[], Batch]


class Split(enum.Enum):
    """The part of a log to read.

    Held out are the rows of the last file where there are several (a click log's files are days),
    else the last part of the only one.
    """

    TRAIN = "train"
    """All but the held-out rows."""
    HELD_OUT = "held_out"
    VALIDATION = "validation"
    """The first half of the held-out rows, and the middle one of an odd number; MLPerf's rule."""
    TEST = "test"
    """The second half of the held-out rows."""
    ALL = "all"


class FileRows(NamedTuple):
    """Rows ``[start, stop)`` of a file, to its end where ``stop`` is None."""

    path: DataPath
    start: int = 0
    stop: int | None = None


class Portion(NamedTuple):
    """Part of an epoch that the ranks have read: each ``num_batches``, or all that it had."""

    world_size: int
    batch_size: int
    """Samples a batch on each rank."""
    num_batches: int


class BatchSource(ABC):
    """The batches of one rank, in an order that never changes; every iteration starts anew.

    Nothing is dropped: the last batch may be smaller than ``batch_size``, and ranks may end up with
    different numbers of batches.

    Args:
        keys: names of the categorical features.
        table_sizes: rows of all features' tables, or of each; ids are less than that, unless they
            are raw.
        num_dense: columns of the dense features.
        batch_size: samples a batch on this rank.
        rank: this rank, in ``[0, world_size)``.
        world_size: number of ranks that share the rows.
        raw_ids: whether ids are the data's own, any 64-bit integers.
    """

    num_rows: int
    """Rows of the split, over all ranks."""

    def __init__(
        self,
        *,
        keys: Sequence[str],
        table_sizes: int | Sequence[int],
        num_dense: int,
        batch_size: int,
        rank: int,
        world_size: int,
        raw_ids: bool = False,
    ) -> None:
        if not isinstance(batch_size, numbers.Integral):
            raise TypeError(f"batch_size must be an int, got {batch_size!r}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in [0, world_size = {world_size}), got {rank}")
        self.keys, self.num_dense = tuple(keys), num_dense
        self.table_sizes = _each_table_size(table_sizes, len(self.keys))
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.raw_ids = raw_ids

    @abstractmethod
    def tasks(self, after: Sequence[Portion] = ()) -> Iterator[BatchTask]:
        """One task a batch, in order. Drawing a task reads what must be read in order; running it
        does the rest of the work, in any thread and concurrently with other tasks.

        Args:
            after: what of the epoch has been read already, by any numbers of ranks, one after the
                other. The ranks that are there now divide all the rest, no row is lost or read
                twice, and the same ranks go on with the same batches.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches of this rank."""

    def __iter__(self) -> Iterator[Batch]:
        return self.begin()

    def begin(self, after: Sequence[Portion] = ()) -> Iterator[Batch]:
        """The batches that are left, as :meth:`tasks` says."""
        for task in self.tasks(after):
            yield task()

    def _blocks(self, num_rows: int, after: Sequence[Portion] = ()) -> range:
        """First rows of this rank's batches: the ranks take blocks of ``batch_size`` in turn, so
        the global batches do not depend on how many ranks share them."""
        first = num_read(after) + self.rank * self.batch_size
        return range(first, num_rows, self.world_size * self.batch_size)


def num_read(after: Sequence[Portion]) -> int:
    """Rows of all ranks' batches that were read, where the ranks take blocks in turn."""
    return sum(world_size * batch_size * count for world_size, batch_size, count in after)


def natural_order(path: DataPath) -> list[str | int]:
    """A sorting key by name that puts ``day_2`` before ``day_10``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def check_days(paths: Sequence[DataPath]) -> None:
    """Check that no day between two others is missing.

    Args:
        paths: in order; the name of each begins with ``day_`` and a number.

    Raises:
        FileNotFoundError: names the first day that is missing.
    """
    numbers = [int(re.split(r"\D+", path.name)[1]) for path in paths]
    for (before, after), path in zip(itertools.pairwise(numbers), paths, strict=False):
        if after > before + 1:
            raise FileNotFoundError(
                f"{path.parent}: days must be numbered without gaps, and day_{before + 1} is "
                f"missing between day_{before} and day_{after}; add it, or number the days anew"
            )


def _each_table_size(table_sizes: int | Sequence[int], num_features: int) -> tuple[int, ...]:
    given = (table_sizes,) * num_features if not isinstance(table_sizes, Iterable) else table_sizes
    sizes = tuple(given)
    for size in sizes:
        if not isinstance(size, numbers.Integral):
            raise TypeError(f"table_sizes must be whole numbers, got {size!r}")
    if len(sizes) != num_features:
        raise ValueError(
            f"table_sizes must be one number or {num_features}, one for each feature, "
            f"got {len(sizes)}"
        )
    if min(sizes, default=1) < 1:
        raise ValueError(f"table_sizes must be at least 1, got {min(sizes)}")
    return tuple(map(int, sizes))


def choose_rows(
    paths: Sequence[DataPath],
    split: Split,
    held_out: float,
    count_rows: Callable[[DataPath], int],
) -> list[FileRows]:
    """The rows of ``split`` in ``paths``, which are in order.

    Args:
        held_out: part of the rows to hold out where there is one file, in (0, 1).
        count_rows: called for no other file than the last, and only where its rows are divided.

    Raises:
        ValueError: if ``held_out`` is out of range, or the split has no rows.
    """
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out must be a part of the rows, in (0, 1), got {held_out}")
    if split is Split.ALL:
        return [FileRows(path) for path in paths]
    *days, last = paths
    if days and split is Split.TRAIN:
        return [FileRows(path) for path in days]
    if days and split is Split.HELD_OUT:
        return [FileRows(last)]
    num_rows = count_rows(last)
    first_held_out = 0 if days else num_rows - round(num_rows * held_out)
    first_test = num_rows - (num_rows - first_held_out) // 2
    start, stop = {
        Split.TRAIN: (0, first_held_out),
        Split.HELD_OUT: (first_held_out, num_rows),
        Split.VALIDATION: (first_held_out, first_test),
        Split.TEST: (first_test, num_rows),
    }[split]
    if start == stop:
        raise ValueError(
            f"{last}: split {split.value!r} has none of its {num_rows} rows; change held_out "
            f"({held_out}) or give more rows"
        )
    return [FileRows(last, start, stop)]
