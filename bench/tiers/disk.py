"""The speed of a disk, by plain reads and writes of one large file."""

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_BLOCK_BYTES = 1 << 22


class DiskRates(NamedTuple):
    """Bytes a second of a large file, front to back."""

    read: float
    written: float


def measured_disk_rates(folder: Path, num_bytes: int = 2**29, num_repeats: int = 3) -> DiskRates:
    """Measure files of ``num_bytes`` in ``folder``, past the memory in which the system caches
    files where the file system allows that, else with it."""
    # Pages of their own, as such reads and writes need.
    block = mmap.mmap(-1, _BLOCK_BYTES)
    block.write(os.urandom(_BLOCK_BYTES))
    count = max(num_bytes // _BLOCK_BYTES, 1)
    with tempfile.NamedTemporaryFile(dir=folder) as made:

        def seconds(flags: int, move: Callable[[int], int]) -> float:
            descriptor = _opened(made.name, flags)
            try:
                start = time.perf_counter()
                for _ in range(count):
                    move(descriptor)
                os.fsync(descriptor)
                return time.perf_counter() - start
            finally:
                os.close(descriptor)

        def rate(flags: int, move: Callable[[int], int]) -> float:
            taken = [seconds(flags, move) for _ in range(num_repeats)]
            return count * _BLOCK_BYTES / statistics.median(taken)

        written = rate(os.O_WRONLY, lambda file: os.write(file, block))
        return DiskRates(rate(os.O_RDONLY, lambda file: os.readv(file, [block])), written)


def _opened(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:  # as in memory, where there is nothing to go past
        return os.open(path, flags)
