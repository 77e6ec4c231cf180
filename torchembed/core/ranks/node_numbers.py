"""Integers that the ranks of one node show each other in shared memory."""

import contextlib
import errno
import mmap
import os
import select
import struct
import tempfile
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

MOST_PENDING = 64
"""How many results after a given one may be started before that one is read."""
_NUM_RECORDS = 2 * MOST_PENDING
_FOLDER = Path("/dev/shm")
_POLLS = 50
"""How often a rank looks for another's record before it sleeps between two looks."""
_POLL_SECONDS = 1e-4
_LOOK_SECONDS = 0.1
"""Time between two looks if all ranks still live."""
_CHECK_BYTES = 8

Minima = Callable[[], tuple[int, ...]]
"""Waits for a result and returns it, in any thread and as often as called."""


class NodeNumbers:
    """Finds the smallest of each of the integers that the ranks of one node give.

    A rank that gives integers writes a record into shared memory, and one that needs the result
    reads the records of all. Where they are there, neither calls the system, and no other thread
    has to wake up, as for a process group's all-reduce, which on few cores takes longer than the
    rest of a step's host work.

    Each rank has a ring of twice as many records as results may be pending. Whoever starts result
    ``n`` has read all records of result ``n - MOST_PENDING``, so that every rank had started that
    one and read those of ``n - 2 * MOST_PENDING``, which the new record replaces.

    A rank holds a lock of the system on one byte of the file for as long as it lives; by it the
    others find out that it has ended.

    Args:
        path: of the file, made by :func:`make_file` on one of the ranks.
        rank: of this process.
        num_ranks: of all processes, each of which opens the file.
        most_numbers: the most integers of a result.
        timeout_seconds: how long another rank's integers are waited for.

    Raises:
        OSError: where there is no such file, as on another node.
    """

    def __init__(
        self, path: Path, rank: int, num_ranks: int, most_numbers: int, timeout_seconds: float
    ) -> None:
        # Not on every system, and needed on several ranks alone.
        import fcntl

        self._rank, self._num_ranks = rank, num_ranks
        self._most_numbers, self._timeout_seconds = most_numbers, timeout_seconds
        self._file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._file)
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self._memory = mmap.mmap(self._file, file_bytes(num_ranks, most_numbers))
        self._record_bytes = _record_bytes(most_numbers)
        self._num_started = 0
        self._pending: deque[tuple[weakref.ref[_Pending], int, struct.Struct]] = deque()
        """The last results that were started, each with its number and the form of its records."""

    def start(self, numbers: Sequence[int]) -> Minima:
        """Give ``numbers``, each of 64 bits and equally many on every rank, which all must call
        this equally often.

        Returns:
            A function that waits for the minimum of each number over the ranks and returns them.
            It raises ``TimeoutError`` where a rank does not give its own in time, and
            ``ConnectionError`` where one has ended before.
        """
        if len(numbers) > self._most_numbers:
            raise ValueError(
                f"numbers must be at most {self._most_numbers}, got {len(numbers)} of them"
            )
        if len(self._pending) == MOST_PENDING:
            self._read_oldest()
        self._num_started += 1
        number = self._num_started
        form = struct.Struct(f"{len(numbers) + 1}q")
        data = form.pack(number, *numbers)
        place = self._place(self._rank, number)
        self._memory[place : place + len(data) + _CHECK_BYTES] = data + _check(data)
        result = _Pending(self, number, form)
        self._pending.append((weakref.ref(result), number, form))
        return result

    def _read_oldest(self) -> None:
        """Read the result that was started first of those that may not have been read."""
        held, number, form = self._pending.popleft()
        result = held()
        if result is None:  # nobody will ask for it, but all ranks must have started it
            result = _Pending(self, number, form)
        result()

    def read(self, result: "_Pending") -> tuple[int, ...]:
        """The minimum of each of the integers of ``result``."""
        given = []
        for rank in range(self._num_ranks):
            numbers = self._wait_for(rank, result)
            if result.found is not None:
                return result.found
            assert numbers is not None
            given.append(numbers)
        return tuple(map(min, zip(*given, strict=True)))

    def _wait_for(self, rank: int, result: "_Pending") -> tuple[int, ...] | None:
        """The integers that ``rank`` has given to ``result``; None where another thread has found
        the result meanwhile, after which records may be replaced."""
        for _ in range(_POLLS):
            numbers = self._record(rank, result)
            if numbers is not None or result.found is not None:
                return numbers
            select.select((), (), (), 0.0)  # lets other threads of Python run
        start = looked = time.monotonic()
        while True:
            now = time.monotonic()
            if now - looked > _LOOK_SECONDS:
                looked = now
                self._check_that_all_live(result)
            numbers = self._record(rank, result)
            if numbers is not None or result.found is not None:
                return numbers
            if now - start > self._timeout_seconds:
                raise TimeoutError(
                    f"rank {rank} did not come within {self._timeout_seconds:g} s to where this "
                    "rank waits for it; every rank must read equally many batches and make the "
                    "same calls: look for one that failed, or give init_process_group a longer "
                    "timeout"
                )
            time.sleep(_POLL_SECONDS)

    def _check_that_all_live(self, result: "_Pending") -> None:
        """Raise ``ConnectionError`` where a rank has ended that has not given its integers to
        ``result``: the one that is waited for may itself wait for that rank."""
        for rank in filter(self._has_ended, range(self._num_ranks)):
            # Looked at after that, since a rank may give its integers and end.
            if self._record(rank, result) is None and result.found is None:
                raise ConnectionError(
                    f"rank {rank} has ended, and this rank waits for it; see its output"
                )

    def _record(self, rank: int, result: "_Pending") -> tuple[int, ...] | None:
        """The integers of the record of ``rank``; None where it is not yet that of ``result``."""
        place, size = self._place(rank, result.number), result.form.size
        data = self._memory[place : place + size]
        # The check fails for a record of which parts are still to be seen by this processor.
        if self._memory[place + size : place + size + _CHECK_BYTES] != _check(data):
            return None
        number, *numbers = result.form.unpack(data)
        return tuple(numbers) if number == result.number else None

    def _has_ended(self, rank: int) -> bool:
        """True if no process holds the lock of ``rank``."""
        import fcntl

        if rank == self._rank:  # the system gives a process its own locks again
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True

    def _place(self, rank: int, number: int) -> int:
        return (rank * _NUM_RECORDS + number % _NUM_RECORDS) * self._record_bytes


class _Pending:
    """A result that is waited for when called first.

    Attributes:
        number: counts the results, from 1.
        form: of its records, less the check.
        found: None until it has been waited for.
    """

    __slots__ = ("__weakref__", "_numbers", "form", "found", "number")

    def __init__(self, numbers: NodeNumbers, number: int, form: struct.Struct) -> None:
        self._numbers, self.number, self.form = numbers, number, form
        self.found: tuple[int, ...] | None = None

    def __call__(self) -> tuple[int, ...]:
        if self.found is None:
            self.found = self._numbers.read(self)
        return self.found


def make_file(num_ranks: int, most_numbers: int) -> Path | None:
    """Make the file of a :class:`NodeNumbers` in the system's shared memory, to be removed once
    every rank has opened it; None where there is no such memory, or no room in it."""
    with contextlib.suppress(OSError):
        file, name = tempfile.mkstemp(prefix="torchembed-", dir=_FOLDER)
        try:
            # A file with holes would end the process that writes where no memory is left.
            os.posix_fallocate(file, 0, file_bytes(num_ranks, most_numbers))
        except OSError:
            Path(name).unlink()
            raise
        finally:
            os.close(file)
        return Path(name)
    return None


def file_bytes(num_ranks: int, most_numbers: int) -> int:
    return num_ranks * _NUM_RECORDS * _record_bytes(most_numbers)


def _record_bytes(most_numbers: int) -> int:
    """Bytes of a record: the number of the result, its integers, and their check."""
    return 8 * (most_numbers + 1) + _CHECK_BYTES


def _check(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(_CHECK_BYTES, "little")
