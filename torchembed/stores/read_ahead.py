"""Lines that are read from a table before they are asked for, on a thread."""

import threading
import weakref
from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchembed.stores.announced_keys import AnnouncedKeys
from torchembed.stores.arguments import check_keys, check_lines, check_positive, check_write
from torchembed.stores.interface import LineChunk, RowTable

_PIECE_BYTES = 1 << 20
"""Lines that the thread reads at once. A read of one of them waits for all."""
_FREE = np.iinfo(np.int64).max
"""Number of announcement of a slot that holds no line."""


class ReadAheadCounts(NamedTuple):
    """Numbers of lines that a :class:`ReadAheadTable` has read so far."""

    rows_ahead: int
    """Rows that the thread has read from the table."""
    rows_taken: int
    """Rows asked for that had been read ahead."""
    rows_late: int
    """Rows asked for that were read from the table by the one who asked."""


class ReadAheadTable:
    """A table (:class:`~torchembed.stores.RowTable`) that reads announced lines ahead.

    A thread reads the lines of announced keys, as many as have been announced by then in ascending
    order of their keys, into a buffer; :meth:`read` takes them from there, and they leave it. It
    waits for those that are being read, and reads all others from the table itself. Every line is
    as up to date as the table's: :meth:`write` and :meth:`delete` change the table and the buffer.
    All writes must come through here, and :meth:`close` empties the buffer where the table is
    restored.

    A full buffer is one in which announced lines wait to be read. The thread then waits for lines
    to be read or retired, so that later lines never make room for themselves at the cost of those
    that are needed first.

    The thread starts with the first announcement and ends with :meth:`close`, or with the object.
    What fails in it is raised by the next call of another method than ``close``, before that does
    anything, and the announcements so far are forgotten.

    Args:
        table: where lines are read and written; any number of threads may use it.
        buffer_bytes: the most bytes of lines that wait in the buffer.

    Raises:
        ValueError: where the buffer has no room for a line.
    """

    def __init__(self, table: RowTable, buffer_bytes: int) -> None:
        check_positive("buffer_bytes", buffer_bytes)
        if buffer_bytes < table.line_bytes:
            raise ValueError(
                f"buffer_bytes must be at least {table.line_bytes}, the bytes of a line of table "
                f"{table.name!r}, got {buffer_bytes}; give it room for the lines of some batches"
            )
        self._table = table
        self._buffer = _Buffer(table, buffer_bytes // table.line_bytes)
        self._thread: threading.Thread | None = None
        # Held while the thread is started or ended.
        self._thread_lock = threading.Lock()
        # Held over each change of the table and the buffer, so that both see the same last one.
        self._write_lock = threading.Lock()
        weakref.finalize(self, self._buffer.stop)

    @property
    def name(self) -> str:
        return self._table.name

    @property
    def line_bytes(self) -> int:
        return self._table.line_bytes

    @property
    def counts(self) -> ReadAheadCounts:
        """So far."""
        with self._buffer.changed:
            return self._buffer.counts

    def announce(self, keys: Tensor) -> int:
        """Have the lines of ``keys`` read, after those of earlier announcements. Never waits for
        the disk.

        Args:
            keys: int64 ``[n]`` on the CPU, any number of times each; copied.

        Returns:
            The number of the announcement, greater than those before it, for :meth:`retire`.
        """
        check_keys(keys)
        unique = np.unique(keys.numpy())
        buffer = self._buffer
        with self._thread_lock, buffer.changed:
            buffer.raise_failure()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=buffer.read_announced,
                    name=f"torchembed: lines of {self.name} to come",
                    daemon=True,
                )
                buffer.is_stopped = False
                self._thread.start()
            number = buffer.announced.add(unique)
            buffer.changed.notify_all()
            return number

    def retire(self, number: int) -> None:
        """Let go of what announcement ``number`` and those before it have named, but for keys that
        a later one has named, too: what was to read these lines has read them."""
        buffer = self._buffer
        with buffer.changed:
            buffer.raise_failure()
            buffer.announced.retire(number)
            buffer.changed.notify_all()

    def read(self, keys: Tensor, lines: Tensor) -> Tensor:
        check_keys(keys)
        check_lines(lines, keys, self.line_bytes)
        found, rest = self._buffer.take(keys.numpy(), lines.numpy())
        if len(rest) == len(keys):
            return self._table.read(keys, lines)
        if len(rest):
            left = torch.empty(len(rest), self.line_bytes, dtype=torch.uint8)
            places = torch.from_numpy(rest)
            is_there = self._table.read(keys[places], left).numpy()
            lines.numpy()[rest[is_there]] = left.numpy()[is_there]
            found[rest] = is_there
        return torch.from_numpy(found)

    def write(self, keys: Tensor, lines: Tensor) -> None:
        check_write(keys, lines, self.line_bytes)
        with self._write_lock:
            self._buffer.check()
            try:
                self._table.write(keys, lines)
            except BaseException:
                self._buffer.forget(keys.numpy())
                raise
            self._buffer.put(keys.numpy(), lines.numpy())

    def delete(self, keys: Tensor) -> None:
        check_keys(keys)
        with self._write_lock:
            self._buffer.check()
            try:
                self._table.delete(keys)
            finally:
                self._buffer.forget(keys.numpy())

    def chunks(self, max_rows: int) -> Iterator[LineChunk]:
        self._buffer.check()
        return self._table.chunks(max_rows)

    def num_rows(self) -> int:
        self._buffer.check()
        return self._table.num_rows()

    def drop(self) -> None:
        self.close()
        self._table.drop()

    def close(self) -> None:
        """End the thread, once the lines that it is reading are there, and empty the buffer. The
        table stays open, and a later announcement starts another thread."""
        with self._thread_lock:
            self._buffer.stop()
            # What holds this may be collected in the thread itself.
            if self._thread not in (None, threading.current_thread()):
                self._thread.join()
            self._thread = None
            self._buffer.clear()


class _Buffer:
    """Lines by key in one array, and the thread that fills it.

    Attributes:
        changed: held by whoever reads or changes what follows; notified of each change.
        announced: keys that are to be read.
        counts: so far.
        is_stopped: True where the thread is to end.
    """

    def __init__(self, table: RowTable, num_rows: int) -> None:
        self._table, self._num_rows = table, num_rows
        self._piece_rows = max(1, _PIECE_BYTES // table.line_bytes)
        self.changed = threading.Condition()
        self.is_stopped = False
        self.announced = AnnouncedKeys()
        self.counts = ReadAheadCounts(0, 0, 0)
        self.clear()

    def clear(self) -> None:
        """Forget all lines and announcements, when no thread reads."""
        with self.changed:
            self.announced = self.announced.emptied()
            self._slots: dict[int, int] = {}
            # These take no memory before they are written.
            self._lines = np.empty((self._num_rows, self._table.line_bytes), dtype=np.uint8)
            self._has_line = np.empty(self._num_rows, dtype=np.bool_)
            self._keys = np.empty(self._num_rows, dtype=np.int64)
            self._numbers = np.empty(self._num_rows, dtype=np.int64)
            """The number of the last announcement that has named the key of each slot."""
            self._end = 0
            """The number of slots that have ever been used: the first ones."""
            self._free: list[int] = []
            """Slots before it that hold no line."""
            self._failure: Exception | None = None
            self._reading: set[int] = set()
            """Keys whose lines the thread reads now, but for those that were changed meanwhile."""
            self._num_reads = 0
            """How many reads the thread has begun."""

    @property
    def room(self) -> int:
        """The number of lines for which there is room."""
        return self._num_rows - len(self._slots)

    def stop(self) -> None:
        """Let the thread end."""
        with self.changed:
            self.is_stopped = True
            self.changed.notify_all()

    def check(self) -> None:
        """Raise what has failed in the thread; once."""
        with self.changed:
            self.raise_failure()

    def raise_failure(self) -> None:
        """The same, for who holds ``changed``."""
        if self._failure is not None:
            error, self._failure = self._failure, None
            raise error

    def take(self, keys: np.ndarray, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take lines from the buffer; waits for those that are being read.

        Returns:
            bool ``[n]``: which keys have a line, as far as the buffer knows; and int64 ``[m]``: the
            places of those of which it knows nothing.
        """
        with self.changed:
            self.raise_failure()
            if not (self._slots or self._reading or self.announced):
                self._count(late=len(keys))
                return np.zeros(len(keys), dtype=np.bool_), np.arange(len(keys))
            wanted = keys.tolist()
            if not self._reading.isdisjoint(wanted):
                current = self._num_reads
                self.changed.wait_for(lambda: self._num_reads != current or not self._reading)
                self.raise_failure()
            slots = np.array(list(map(self._slots.get, wanted, repeat(-1))), dtype=np.int64)
            is_buffered = slots >= 0
            found = np.zeros(len(keys), dtype=np.bool_)
            found[is_buffered] = self._has_line[slots[is_buffered]]
            lines[found] = self._lines[slots[found]]
            rest = np.flatnonzero(~is_buffered)
            self._release(np.unique(slots[is_buffered]))
            self.announced.cancel(keys[rest])
            self._count(taken=len(keys) - len(rest), late=len(rest))
            self.changed.notify_all()
            return found, rest

    def put(self, keys: np.ndarray, lines: np.ndarray) -> None:
        """Take over lines that were written, of keys that the buffer holds."""
        with self.changed:
            if not (self._slots or self._reading):
                return
            wanted = keys.tolist()
            self._reading.difference_update(wanted)
            slots = np.array(list(map(self._slots.get, wanted, repeat(-1))), dtype=np.int64)
            # NumPy leaves open which of several lines for one slot stays.
            slots, last = np.unique(slots[::-1], return_index=True)
            places = len(wanted) - 1 - last[slots >= 0]
            slots = slots[slots >= 0]
            self._lines[slots] = lines[places]
            self._has_line[slots] = True

    def forget(self, keys: np.ndarray) -> None:
        """Drop lines that were deleted, or may have been changed."""
        with self.changed:
            if not (self._slots or self._reading):
                return
            wanted = set(keys.tolist())
            self._reading -= wanted
            slots = [self._slots[key] for key in wanted if key in self._slots]
            self._release(np.array(slots, dtype=np.int64))
            self.changed.notify_all()

    def read_announced(self) -> None:
        """Read the lines of announced keys until the buffer is stopped; the thread's program."""
        while True:
            with self.changed:
                piece = self._next_piece()
                while piece is None and not self.is_stopped:
                    self.changed.notify_all()
                    self.changed.wait()
                    piece = self._next_piece()
                if self.is_stopped or piece is None:
                    return
                keys, numbers = piece
                self._reading = set(keys.tolist())
                self._num_reads += 1
            try:
                lines = torch.empty(len(keys), self._table.line_bytes, dtype=torch.uint8)
                found = self._table.read(torch.from_numpy(keys), lines)
            except Exception as error:  # noqa: BLE001 - raised by the next call
                read = error
            else:
                read = lines.numpy(), found.numpy()
            with self.changed:
                if isinstance(read, Exception):
                    self._failure = read
                    self.announced = self.announced.emptied()
                else:
                    self._publish(keys, numbers, *read)
                self._reading = set()
                self.changed.notify_all()

    def _next_piece(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Keys to read next, ascending, with the number of their announcement; None where there is
        none, or no room."""
        self.announced.plan(self.room)
        if self.room < self._piece_rows and self.announced:
            self._release(np.flatnonzero(self._numbers[: self._end] <= self.announced.retired))
            self.announced.plan(self.room)
        while self.room:
            keys, numbers = self.announced.next_piece(min(self._piece_rows, self.room))
            if not keys.size and self.announced:
                # Nothing of the plan was left to be read.
                self.announced.plan(self.room)
                continue
            if not keys.size:
                return None
            slots = np.array(list(map(self._slots.get, keys.tolist(), repeat(-1))), dtype=np.int64)
            is_new = slots < 0
            self._numbers[slots[~is_new]] = numbers[~is_new]
            if is_new.any():
                return keys[is_new], numbers[is_new]
        return None

    def _publish(
        self, keys: np.ndarray, numbers: np.ndarray, lines: np.ndarray, found: np.ndarray
    ) -> None:
        """Put lines that were read into the buffer, but for those that were changed meanwhile."""
        self._count(ahead=len(keys))
        listed = keys.tolist()
        places = [place for place, key in enumerate(listed) if key in self._reading]
        num_free = min(len(places), len(self._free))
        num_new = len(places) - num_free
        slots = [self._free.pop() for _ in range(num_free)]
        slots += range(self._end, self._end + num_new)
        self._end += num_new
        self._slots.update(zip((listed[place] for place in places), slots, strict=True))
        self._lines[slots], self._has_line[slots] = lines[places], found[places]
        self._keys[slots], self._numbers[slots] = keys[places], numbers[places]

    def _release(self, slots: np.ndarray) -> None:
        for key in self._keys[slots].tolist():
            del self._slots[key]
        self._numbers[slots] = _FREE
        self._free.extend(slots.tolist())

    def _count(self, *, ahead: int = 0, taken: int = 0, late: int = 0) -> None:
        counts = self.counts
        self.counts = ReadAheadCounts(
            counts.rows_ahead + ahead, counts.rows_taken + taken, counts.rows_late + late
        )
