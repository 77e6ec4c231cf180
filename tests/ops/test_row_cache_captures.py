"""On a GPU no operation on a cache of rows makes the host wait, so that they are part of a graph,
and rows that are stored in memory of the host are moved by kernels."""

import pytest
import torch
from torch import Tensor

from tests.support import lanes
from tests.support.tolerance import assert_same_bits
from torchembed.ops.row_cache import (
    CacheCounter,
    claim_slots,
    dirty_moves,
    empty_row_cache,
    find_cached,
    forget_rows,
    move_rows,
    read_rows,
)
from torchembed.ops.segments import find_runs

NUM_ROWS, NUM_SLOTS, NUM_IDS, DIM = 5000, 900, 600, 128

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def compiled_kernels(device: torch.device) -> None:
    if lanes.picked_kernel("claim_slots", device) != "triton":
        pytest.skip("the reference may synchronize")


class Step:
    """A batch's rows are brought into the cache, read and trained; then rows of another batch are
    read wherever they are."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows = torch.zeros(NUM_IDS, dtype=torch.int64, device=device)
        self.epoch = torch.zeros(1, dtype=torch.int64, device=device)
        self.cache = empty_row_cache(NUM_ROWS, NUM_SLOTS, device)
        self.cached = [
            torch.zeros(NUM_SLOTS, DIM, dtype=torch.bfloat16, device=device),
            torch.zeros(NUM_SLOTS, device=device),
        ]
        self.stored = [
            torch.zeros(NUM_ROWS, DIM, dtype=torch.bfloat16, pin_memory=True),
            torch.zeros(NUM_ROWS, pin_memory=True),
        ]

    def state(self) -> list[Tensor]:
        return [*self.cache, *self.cached, *self.stored]

    def load(self, number: int) -> None:
        """Another batch, in the same buffers."""
        generator = torch.Generator().manual_seed(number)
        uniform = torch.rand(NUM_IDS, generator=generator)
        self.rows.copy_((NUM_ROWS**uniform).long() - 1)
        self.epoch.fill_(number)

    def run(self) -> list[Tensor]:
        runs = find_runs(self.rows, NUM_ROWS)
        claimed = claim_slots(
            self.cache,
            runs.unique_rows,
            runs.num_runs,
            epoch=self.epoch,
            released=self.epoch - 1,
            is_trained=self.epoch > 0,
        )
        move_rows(claimed.moves, self.cached, self.stored)
        slots = find_cached(self.cache.slot_of_row, self.rows)
        used = slots.clamp_min(0)
        self.cached[1].index_fill_(0, used, 0.5)
        self.cached[0].index_copy_(0, used, self.rows[:, None].expand(-1, DIM).bfloat16())
        others = (self.rows * 7 + self.epoch) % NUM_ROWS
        there = find_cached(self.cache.slot_of_row, others)
        read = read_rows(self.cached[0], self.stored[0], there, others)
        return [*claimed.moves, claimed.num_refused, slots, read]

    def write_back(self) -> None:
        move_rows(dirty_moves(self.cache), self.cached, self.stored)
        forget_rows(self.cache)


def test_nothing_makes_the_host_wait(device: torch.device) -> None:
    step = Step(device)
    step.load(1)
    step.run()  # compiles the kernels, which waits
    step.write_back()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
        step.write_back()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_step_replays_on_other_batches(device: torch.device) -> None:
    eager, captured = Step(device), Step(device)
    captured.load(1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = captured.run()
    torch.cuda.synchronize()
    for tensor, fresh in zip(captured.state(), Step(device).state(), strict=True):
        tensor.copy_(fresh)
    for number in range(2, 30):
        captured.load(number)
        graph.replay()
        eager.load(number)
        for result, expected in zip(results, eager.run(), strict=True):
            assert_same_bits(result, expected)
    for step in (eager, captured):
        step.write_back()
    torch.cuda.synchronize()
    for tensor, expected in zip(captured.state(), eager.state(), strict=True):
        assert_same_bits(tensor, expected)
    assert int(eager.cache.counters[CacheCounter.WRITTEN_ROWS]) > NUM_SLOTS


def test_memory_that_is_not_pinned_is_refused(device: torch.device) -> None:
    slots = torch.zeros(3, dtype=torch.int64, device=device)
    cached, stored = torch.zeros(2, DIM, device=device), torch.zeros(9, DIM)
    with pytest.raises(ValueError, match=r"^stored must be on the device of rows, cuda:\d+, or in"):
        read_rows(cached, stored, slots, slots)
