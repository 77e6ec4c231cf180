"""The look-ahead at batches to come whose rows are on disk."""

import collections
import functools
import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from torchembed.core.checks import signed_ids
from torchembed.core.features import SparseFeatures, as_sparse_features
from torchembed.core.trees import Tree
from torchembed.modules.staged_collection import StagedCollection
from torchembed.modules.table_module import TableModule
from torchembed.ops.hash_table import find_slots, int64_keys
from torchembed.sharding.transport.global_rows import are_here
from torchembed.step.batches.batch_layout import sparse_features
from torchembed.step.batches.worker import Worker
from torchembed.tables import AnnouncedRows, DiskGroup, HashIndex, Table, table_of

_CLOSE_SECONDS = 60.0


class _Ids(NamedTuple):
    """Ids of a batch, and the table in which they are looked up."""

    table: Table
    group: DiskGroup
    ids: Tensor


class DiskReadAhead:
    """Has the rows of batches to come read from the disk, so that these need not wait for them.

    A pipeline itself looks one or two batches ahead. Given to a
    :class:`~torchembed.data.BackgroundLoader` that makes ``num_ahead`` batches ahead, it is told of
    each, and a thread for each group of tables on :class:`~torchembed.Disk` reads their rows that
    are not in host memory, or leave it: as many as are known at a time, in the order in which they
    are on disk, so that a long look-ahead reads it nearly in sequence. Training is the same, bit
    for bit. It takes 5 bytes of host memory for each row of a table, beside ``buffer_bytes``.

    Rows are known of collections, by the names of features, whose batches are on the CPU; of
    dynamic tables where these are on the CPU, too. On several ranks each reads those of its own
    batches that it holds. Rows of other batches and modules are read when they are admitted.

    Args:
        model: its tables on disk.
        buffer_bytes: memory of the host for rows that were read and are still to be used, of all
            tables on this rank together. Rows for which there is no room are read once some were
            used.
    """

    def __init__(self, model: nn.Module, *, buffer_bytes: int = 1 << 30) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if isinstance(buffer_bytes, bool) or not isinstance(buffer_bytes, int):
            raise TypeError(f"buffer_bytes must be an int, got {buffer_bytes!r}")
        if buffer_bytes < 1:
            raise ValueError(f"buffer_bytes must be positive, got {buffer_bytes}")
        self._model, self._buffer_bytes = model, buffer_bytes
        self._modules = [m for m in model.modules() if isinstance(m, TableModule)]
        self._collections = [m for m in self._modules if isinstance(m, StagedCollection)]
        self._worker: Worker | None = None
        self._under_way: collections.deque[Future[None]] = collections.deque()
        self._announced: dict[int, list[AnnouncedRows]] = {}
        """The rows of each announcement by its number, in order; the worker's alone."""
        self._last, self._is_closed = 0, False

    def announce(self, batch: Tree) -> int:
        """Have the rows of ``batch`` read, after those announced before. Call it between steps, or
        let a ``BackgroundLoader`` do it; never waits for the disk.

        Returns:
            The number of the announcement, for :meth:`retire`.

        Raises:
            RuntimeError: once it is closed.
            Exception: what reading rows of earlier announcements failed with.
        """
        found = [as_sparse_features(part) for part in sparse_features(batch)]
        return self._submit([ids for part in found for ids in self._ids_of(part)])

    def announce_ids(self, name: str, ids: Tensor) -> int:
        """Have the rows of ``ids`` of one table read, as of a pass over data whose ids are known
        beforehand; otherwise as :meth:`announce`.

        Args:
            name: of the table's weight in ``state_dict``.
            ids: of any shape, on the CPU: int64, int32, uint32 or uint64 (by its bits). Of a
                sharded table ids of all ranks; each reads its own.

        Raises:
            TypeError: if ``ids`` is no tensor of these dtypes.
            ValueError: for a name that no table on disk has here, and ids on another device.
            IndexError: for an id that a static table does not have.
        """
        if not isinstance(ids, Tensor):
            raise TypeError(f"ids must be a tensor, got {type(ids).__name__}; call torch.tensor")
        if ids.device.type != "cpu":
            raise ValueError(f"ids must be on the CPU, got {ids.device}; call .cpu()")
        ids = signed_ids("ids", ids).long().flatten()
        tables = {n: table_of(parameter) for n, parameter in self._model.named_parameters()}
        table = tables.get(name)
        if table is None or not isinstance(table.group, DiskGroup):
            on_disk = [n for n, t in tables.items() if t and isinstance(t.group, DiskGroup)]
            raise ValueError(
                f"name must be that of the weight of a table on disk, {on_disk}, got {name!r}"
            )
        _check_range(table, ids)
        return self._submit([_Ids(table, table.group, ids)])

    def retire(self, number: int) -> None:
        """Let go of what announcement ``number`` and those before it have named: their batches were
        trained, or will not be.

        Raises:
            TypeError: if ``number`` is no int.
            ValueError: if no announcement has it.
        """
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"number must be an int, as announcing gave it, got {number!r}")
        if not 0 < number <= self._last:
            raise ValueError(
                f"number must be one that announcing gave, from 1 to {self._last}, got {number}"
            )
        if self._worker is not None:
            self._under_way.append(self._worker.submit(lambda: self._retire(number)))

    def wait(self) -> None:
        """Wait until the rows of all announcements are known to the threads that read them.

        Raises:
            Exception: as :meth:`announce`.
        """
        while self._under_way:
            self._under_way.popleft().result()

    def close(self) -> None:
        """End the threads, and forget what was announced; nothing is announced from then on."""
        self._is_closed = True
        if self._worker is not None:
            self._worker.close(_CLOSE_SECONDS)
            self._worker = None
        self._under_way.clear()
        self._announced.clear()
        for group in self._groups():
            group.lines.store.stop_reading_ahead()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ids_of(self, features: SparseFeatures) -> Iterator[_Ids]:
        """The ids of ``features`` that are looked up in tables on disk."""
        if features.values.device.type != "cpu":
            return
        bounds = _bounds(features)
        for collection in self._collections:
            if not collection.disk_groups():
                continue
            of_tables = collection.features_of_tables
            for table in collection.table_set.tables:
                if not isinstance(table.group, DiskGroup):
                    continue
                names = of_tables.get(table.spec.name, ())
                places = [features.keys.index(name) for name in names if name in features.keys]
                if places:
                    parts = [features.values[bounds[p] : bounds[p + 1]] for p in places]
                    yield _Ids(table, table.group, torch.cat(parts))

    def _submit(self, found: list[_Ids]) -> int:
        if self._is_closed:
            raise RuntimeError(
                "this DiskReadAhead is closed, and reads nothing that is announced; make another "
                "one, and keep it open while batches are announced"
            )
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()
        self._last += 1
        number = self._last
        if found:
            if self._worker is None:
                self._worker = Worker("torchembed: rows of batches to come")
            size = self._buffer_bytes // len(self._groups())
            task = functools.partial(self._announce, number, found, size)
            self._under_way.append(self._worker.submit(task))
        return number

    def _announce(self, number: int, found: list[_Ids], size: int) -> None:
        """Find the rows of ids, and have them read; on the worker.

        Args:
            size: in bytes, of each group's buffer.
        """
        by_group: dict[DiskGroup, list[Tensor]] = {}
        for table, group, ids in found:
            by_group.setdefault(group, []).append(_rows_of(table, group, int64_keys(ids)))
        self._announced[number] = [
            group.lines.read_ahead(torch.cat(rows), group.num_rows, size)
            for group, rows in by_group.items()
        ]

    def _groups(self) -> set[DiskGroup]:
        return {group for module in self._modules for group in module.disk_groups()}

    def _retire(self, number: int) -> None:
        for known in [known for known in self._announced if known <= number]:
            for rows in self._announced.pop(known):
                rows.retire()


def _check_range(table: Table, ids: Tensor) -> None:
    """Raise ``IndexError`` where a static ``table`` does not have one of ``ids``, int64 ``[n]``."""
    num_ids = table.spec.num_ids
    if num_ids is None:
        return
    is_bad = (ids < 0) | (ids >= num_ids)
    if is_bad.any():
        first = int(is_bad.byte().argmax())
        raise IndexError(
            f"ids must be at least 0 and less than {num_ids}, the number of rows of table "
            f"{table.spec.name}, got {int(ids[first])} at position {first}, the first of "
            f"{int(is_bad.sum())} such ids; leave them out"
        )


def _bounds(features: SparseFeatures) -> list[int]:
    """The positions at which the ids of each feature begin, and the last ones end."""
    if features.hotness is not None:
        counts = (hotness * features.batch_size for hotness in features.hotness)
        return [0, *itertools.accumulate(counts)]
    assert features.offsets is not None
    places = torch.arange(len(features.keys) + 1) * features.batch_size
    return features.offsets[places].tolist()


def _rows_of(table: Table, group: DiskGroup, ids: Tensor) -> Tensor:
    """The rows of the group that ``ids``, int64 ``[n]``, have here; others are left out."""
    ids = ids[are_here(table, ids)]
    index = group.index
    if not isinstance(index, HashIndex):
        return ids - table.first_row + group.first_row_of(table)
    if index.hash_tables.keys.device.type != "cpu":
        return ids[:0]
    number = group.tables.index(table)
    slots = find_slots(index.hash_tables, ids, torch.full_like(ids, number, dtype=torch.int32))
    return slots[slots >= 0]
