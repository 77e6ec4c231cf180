"""Processes that fill stores in memory, and say how far their own memory grew."""

import re
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from torchembed.stores import VolatileMemoryStore, VolatileOptions

CHUNK_BYTES = 1 << 22


def fill_a_store(
    messages: Connection, num_rows: int, line_bytes: int, options: VolatileOptions
) -> None:
    """Write rows; sends the most memory that the process had, beyond what it had before.

    The system may meanwhile take pages of files back, such as those of torch's libraries, so that
    all memory grows by less than the store's. So what is of no file counts, too, which is known
    between two writes alone; the larger of both is sent.
    """
    per_chunk = min(num_rows, CHUNK_BYTES // (line_bytes + 8))
    with VolatileMemoryStore(options) as store:
        table = store.table("t", line_bytes)
        store.table("first", line_bytes).write(*_rows(0, per_chunk, line_bytes))
        Path("/proc/self/clear_refs").write_text("5")
        before, own_before = _bytes_of("VmHWM"), _bytes_of("RssAnon")
        own_most = own_before
        for begin in range(0, num_rows, per_chunk):
            table.write(*_rows(begin, min(per_chunk, num_rows - begin), line_bytes))
            own_most = max(own_most, _bytes_of("RssAnon"))
        messages.send(max(_bytes_of("VmHWM") - before, own_most - own_before))


def _rows(begin: int, num_rows: int, line_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Far apart, as hashed ids are.
    keys = torch.arange(begin, begin + num_rows) * (0x9E3779B97F4A7C15 - (1 << 64))
    return keys, torch.full((num_rows, line_bytes), 7, dtype=torch.uint8)


def _bytes_of(name: str) -> int:
    """A size in this process's status: ``VmHWM``, the most memory since ``clear_refs`` was written,
    or ``RssAnon``, that of no file."""
    (kilobytes,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024
