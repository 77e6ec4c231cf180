"""On a GPU no operation on hash tables makes the host wait, so that they are part of a graph."""

import pytest
import torch
from torch import Tensor

from tests.support import lanes
from tests.support.hash_tables import int64
from tests.support.tolerance import assert_same_bits
from torchembed.ops.hash_table import (
    Policy,
    TableShape,
    empty_hash_tables,
    erase_keys,
    find_slots,
    insert_keys,
    touch_slots,
)
from torchembed.ops.initialize_rows import initialize_rows
from torchembed.tables import Constant, InitializedTable, Normal, initial_values

NUM_KEYS = 500
SHAPES = [TableShape(2, 2, 16), TableShape(1, 3, 30)]

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def compiled_kernels(device: torch.device) -> None:
    if lanes.picked_kernel("insert_keys", device) != "triton":
        pytest.skip("the reference may synchronize")


class Step:
    """A batch of keys finds its rows, or is given some, and some keys are erased."""

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self.policy, self.device = policy, device
        self.keys = torch.zeros(NUM_KEYS, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(NUM_KEYS, dtype=torch.int32, device=device)
        self.epoch = int64(0, device=device)
        initialized = [
            InitializedTable(number, initializer, 64)
            for number, initializer in enumerate((Normal(), Constant(value=2.0)))
        ]
        self.values = initial_values(initialized, device)
        self.weight = torch.zeros(sum(shape.num_rows for shape in SHAPES), 8, device=device)
        self.tables = empty_hash_tables(SHAPES, policy, device)

    def state(self) -> list[Tensor]:
        return [self.weight, *(tensor for tensor in self.tables if tensor is not None)]

    def load(self, number: int) -> None:
        """Another batch, in the same buffers."""
        generator = torch.Generator().manual_seed(number)
        self.keys.copy_(torch.randint(-90, 90, (NUM_KEYS,), generator=generator))
        self.numbers.copy_(torch.randint(-1, len(SHAPES), (NUM_KEYS,), generator=generator))
        self.epoch.fill_(number)

    def run(self) -> list[Tensor]:
        number = self.epoch // 2 if self.policy is Policy.EPOCH_LFU else None
        scores = self.keys * 3 if self.policy is Policy.CALLER else None
        slots = find_slots(self.tables, self.keys, self.numbers)
        touch_slots(
            self.tables,
            slots,
            self.numbers,
            policy=self.policy,
            epoch=self.epoch,
            epoch_number=number,
            scores=scores,
        )
        inserted = insert_keys(
            self.tables,
            self.keys,
            self.numbers,
            slots,
            policy=self.policy,
            epoch=self.epoch,
            released=self.epoch - 1,
            epoch_number=number,
            scores=scores,
        )
        initialize_rows(
            self.weight,
            (),
            inserted.new_slots,
            inserted.keys,
            inserted.tables,
            self.values,
            num_new=inserted.num_new,
        )
        erased = erase_keys(self.tables, self.keys[:9], self.numbers[:9], released=self.epoch)
        return [slots, *inserted, erased, *self.state()]


@pytest.mark.parametrize("policy", list(Policy))
def test_nothing_makes_the_host_wait(policy: Policy, device: torch.device) -> None:
    step = Step(policy, device)
    step.load(1)
    step.run()  # compiles the kernels, which waits
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("policy", list(Policy))
def test_a_captured_step_replays_on_other_batches(policy: Policy, device: torch.device) -> None:
    eager, captured = Step(policy, device), Step(policy, device)
    captured.load(1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = captured.run()
    for tensor, fresh in zip(captured.state(), Step(policy, device).state(), strict=True):
        tensor.copy_(fresh)
    for number in (2, 3, 4, 5):
        captured.load(number)
        graph.replay()
        eager.load(number)
        for result, expected in zip(results, eager.run(), strict=True):
            assert_same_bits(result, expected)
