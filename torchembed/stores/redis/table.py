"""A table of a store in Redis: each line is a field of its partition's hash."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchembed.core.key_partitions import partition_of
from torchembed.stores.arguments import check_keys, check_lines, check_positive, check_write
from torchembed.stores.errors import CorruptStoreError
from torchembed.stores.interface import LineChunk
from torchembed.stores.last_places import last_places
from torchembed.stores.redis.commands import (
    Exchange,
    as_decimals,
    command,
    exchange,
    rows_command,
    transaction,
)
from torchembed.stores.redis.layout import key_fields, partition_names
from torchembed.stores.redis.pages import all_keys
from torchembed.stores.redis.scripts import ADD_COUNTS, ADVANCE_TIMES, COUNT_FROM_ZERO, DELETE
from torchembed.stores.volatile.options import OverflowPolicy

if TYPE_CHECKING:
    from torchembed.stores.redis.store import RedisStore


class RedisRead(NamedTuple):
    """A read that is to be noted."""

    keys: np.ndarray
    microseconds: int


class RedisTable:
    """Lines by key (:class:`~torchembed.stores.RowTable`) in the partitions of a table in Redis."""

    def __init__(self, store: "RedisStore", name: str, line_bytes: int, record: Exchange) -> None:
        self.name = name
        self.line_bytes = line_bytes
        self._store = store
        self._record = record
        """Writes what the store says of the table, where it is missing: with every batch, since a
        Redis that was started anew may have lost it."""
        self._options = store.options
        self._policy = store.options.overflow_policy
        self._names = [
            partition_names(store.redis_options.layout, name, partition)
            for partition in range(store.options.num_partitions)
        ]
        self._notes = (
            self._policy is not OverflowPolicy.EVICT_RANDOM and not store.redis_options.is_read_only
        )

    def read(self, keys: Tensor, lines: Tensor) -> Tensor:
        check_keys(keys)
        check_lines(lines, keys, self.line_bytes)
        self._store._check_open()
        found = self._read(keys.numpy(), lines.numpy())
        if self._notes and found.any():
            read = RedisRead(keys.numpy()[found], _microseconds())
            self._store._refresher.add(self, read, len(read.keys))
        return torch.from_numpy(found)

    def write(self, keys: Tensor, lines: Tensor) -> None:
        check_write(keys, lines, self.line_bytes)
        self._store._check_writable()
        keys_array, lines_array = keys.numpy(), lines.numpy()
        places = last_places(keys_array)
        keys_array, lines_array = keys_array[places], lines_array[places]
        for batch in self._batches_of(len(keys_array)):
            self._write(keys_array[batch], lines_array[batch])

    def delete(self, keys: Tensor) -> None:
        check_keys(keys)
        self._store._check_writable()
        keys_array = keys.numpy()
        for batch in self._batches_of(len(keys_array)):
            exchanges = []
            for partition, places in self._by_partition(keys_array[batch]):
                names, fields = self._names[partition], key_fields(keys_array[batch][places])
                head = [b"EVAL", DELETE, 2, names.values, names.accesses]
                exchanges.append(exchange(names.values, rows_command(head, fields)))
            self._store._nodes.run(exchanges)

    def chunks(self, max_rows: int) -> Iterator[LineChunk]:
        check_positive("max_rows", max_rows)
        self._store._check_open()
        keys = all_keys(self._store._nodes, [names.values for names in self._names])
        return self._read_chunks(np.sort(np.concatenate(keys)), max_rows)

    def num_rows(self) -> int:
        self._store._check_open()
        names = [names.values for names in self._names]
        lengths = self._store._nodes.run([exchange(n, command(b"HLEN", n)) for n in names])
        return sum(length for (length,) in lengths)

    def drop(self) -> None:
        """Delete all rows, as :meth:`RowTable.drop`; the table's name stays on record."""
        self._store._check_writable()
        self._store._nodes.run(
            [
                exchange(names.values, command(b"UNLINK", names.values, names.accesses))
                for names in self._names
            ]
        )

    def note_reads(self, reads: list[RedisRead]) -> None:
        """Note reads; for the refresher's thread alone."""
        keys = np.concatenate([read.keys for read in reads])
        if self._policy is OverflowPolicy.EVICT_LEAST_USED:
            script = ADD_COUNTS
            keys, numbers = np.unique(keys, return_counts=True)
        else:
            script = ADVANCE_TIMES
            times = [np.full(len(read.keys), read.microseconds) for read in reads]
            numbers = np.concatenate(times)
            places = last_places(keys)
            keys, numbers = keys[places], numbers[places]
        for batch in self._batches_of(len(keys)):
            exchanges = []
            for partition, places in self._by_partition(keys[batch]):
                columns = key_fields(keys[batch][places]), as_decimals(numbers[batch][places])
                accesses = self._names[partition].accesses
                head = [b"EVAL", script, 1, accesses]
                exchanges.append(exchange(accesses, rows_command(head, *columns)))
            self._store._nodes.run(exchanges)

    def _read(self, keys: np.ndarray, lines: np.ndarray) -> np.ndarray:
        """Read lines; which keys have one, bool ``[n]``."""
        found = np.zeros(len(keys), dtype=np.bool_)
        for batch in self._batches_of(len(keys)):
            parts = self._by_partition(keys[batch])
            exchanges = []
            for partition, places in parts:
                name = self._names[partition].values
                fields = key_fields(keys[batch][places])
                exchanges.append(exchange(name, rows_command([b"HMGET", name], fields)))
            replies = self._store._nodes.run(exchanges)
            for (_, places), (values,) in zip(parts, replies, strict=True):
                places = places + batch.start
                kept = [value for value in values if value is not None]
                if len(kept) < len(values):
                    places = places[[value is not None for value in values]]
                lines[places] = self._joined(kept)
                found[places] = True
        return found

    def _write(self, keys: np.ndarray, lines: np.ndarray) -> None:
        """Write the lines of a batch, and evict others from partitions that overflow."""
        now = np.frombuffer(b"%019d" % _microseconds(), dtype=np.uint8)
        is_bounded = self._options.overflow_margin_rows is not None
        parts, exchanges = self._by_partition(keys), []
        for partition, places in parts:
            names, fields = self._names[partition], key_fields(keys[places])
            commands = [rows_command([b"HSET", names.values], fields, lines[places])]
            if self._policy is OverflowPolicy.EVICT_OLDEST:
                times = np.broadcast_to(now, (len(fields), len(now)))
                commands.append(rows_command([b"HSET", names.accesses], fields, times))
            elif self._policy is OverflowPolicy.EVICT_LEAST_USED:
                head = [b"EVAL", COUNT_FROM_ZERO, 1, names.accesses]
                commands.append(rows_command(head, fields))
            if is_bounded:
                commands += [command(b"HLEN", names.values), command(b"GET", names.generation)]
            exchanges.append(transaction(names.values, *commands))
        *replies, _ = self._store._nodes.run([*exchanges, self._record])
        margin, num_left = self._options.overflow_margin_rows, self._options.num_rows_left
        if margin is None or num_left is None:
            return
        for (partition, _), (*_, done) in zip(parts, replies, strict=True):
            num_rows, generation = done[-2:]
            if num_rows > margin:
                names = self._names[partition]
                self._store._resolver.resolve(names, generation or b"0", num_left)

    def _read_chunks(self, keys: np.ndarray, max_rows: int) -> Iterator[LineChunk]:
        for begin in range(0, len(keys), max_rows):
            self._store._check_open()
            piece = keys[begin : begin + max_rows]
            lines = np.empty((len(piece), self.line_bytes), dtype=np.uint8)
            found = self._read(piece, lines)
            if found.any():
                yield LineChunk(torch.from_numpy(piece[found]), torch.from_numpy(lines[found]))

    def _batches_of(self, num_rows: int) -> Iterator[slice]:
        for begin in range(0, num_rows, self._options.max_batch_rows):
            yield slice(begin, begin + self._options.max_batch_rows)

    def _by_partition(self, keys: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """The partitions of ``keys``, each with the places of its keys."""
        num_partitions = self._options.num_partitions
        partitions = partition_of(torch.from_numpy(keys), num_partitions).numpy()
        order = np.argsort(partitions, kind="stable")
        ends = np.cumsum(np.bincount(partitions, minlength=num_partitions))
        places = np.split(order, ends[:-1])
        return [(n, of_one) for n, of_one in enumerate(places) if len(of_one)]

    def _joined(self, values: list[Any]) -> np.ndarray:
        lengths = set(map(len, values))
        if lengths - {self.line_bytes}:
            raise CorruptStoreError(
                f"lines of table {self.name!r} in {self._store} must have {self.line_bytes} "
                f"bytes, and some have {max(lengths - {self.line_bytes})}; delete its rows, or "
                "give the table another name"
            )
        return np.frombuffer(b"".join(values), dtype=np.uint8).reshape(-1, self.line_bytes)


def _microseconds() -> int:
    """Since 1970, by the clock of this machine."""
    return time.time_ns() // 1000
