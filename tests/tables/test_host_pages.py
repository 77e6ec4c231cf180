"""Memory of the host that the system gives before it is locked for a GPU."""

import mmap
import resource
from pathlib import Path

import torch

from torchembed.tables.tiers.host_memory import touch_pages


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_pages_that_were_touched_are_there() -> None:
    num_pages = 3 * (1 << 14) + 5
    memory = mmap.mmap(-1, 4096 * num_pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made = torch.frombuffer(memory, dtype=torch.float32).view(num_pages, 1024)
    before = resident_bytes()
    touch_pages(made)
    # Other threads may have given memory back meanwhile, but not most of 200 MB.
    assert resident_bytes() - before > made.nbytes / 2


def test_a_byte_of_each_page_is_zeroed() -> None:
    made = torch.full((2, 4096), 7, dtype=torch.uint8)
    touch_pages(made)
    assert made[:, 0].tolist() == [0, 0] and made[:, 1:].unique().tolist() == [7]
    row = torch.full((3,), 1.0)
    touch_pages(row)
    assert row.tolist()[1:] == [1.0, 1.0]
