"""Any sequence of batches leaves a cache of rows as a plain Python program has it, and every row
with the values that training gave it."""

from random import Random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support import lanes
from tests.support.row_cache_model import ModelledCache
from tests.support.sizes import Sizes
from torchembed.ops.row_cache import CacheCounter

NUM_ROWS = 12


class RowCacheMachine(RuleBasedStateMachine):
    """A cache and at most three batches under way."""

    device: torch.device

    @initialize(num_slots=st.integers(1, 9))
    def make(self, num_slots: int) -> None:
        self.model = ModelledCache(NUM_ROWS, num_slots, self.device)

    @rule(
        ids=st.lists(st.integers(-1, NUM_ROWS - 1), max_size=16),
        is_trained=st.sampled_from([True] * 4 + [False]),
        dtype=st.sampled_from([torch.int32, torch.int64]),
    )
    def claim(self, ids: list[int], is_trained: bool, dtype: torch.dtype) -> None:
        while len(self.model.under_way) > 2:
            self.model.train()
        self.model.claim(ids, is_trained=is_trained, dtype=dtype)

    @rule(num_ids=st.integers(1, 12))
    def claim_rows_that_are_cached(self, num_ids: int) -> None:
        held = list(self.model.plain.slot_of)[:num_ids]
        self.claim(held, is_trained=True, dtype=torch.int64)

    @precondition(lambda self: hasattr(self, "model") and self.model.under_way)
    @rule()
    def train(self) -> None:
        self.model.train()

    @rule()
    def write_dirty(self) -> None:
        self.model.write_dirty()

    @rule()
    def forget(self) -> None:
        self.model.forget()

    @invariant()
    def is_what_the_plain_one_is(self) -> None:
        if hasattr(self, "model"):
            self.model.check()


def test_holds_what_a_plain_program_holds(device: torch.device, sizes: Sizes) -> None:
    machine = type("Machine", (RowCacheMachine,), {"device": device})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=sizes.num_examples,
            stateful_step_count=20,
            derandomize=True,
            database=None,
        ),
    )


@pytest.mark.parametrize("num_under_way", [1, 3])
def test_a_long_sequence_of_skewed_batches(num_under_way: int, device: torch.device) -> None:
    """Caches that are full most of the time, and whose hand goes around several times."""
    num_slots, num_batches = (60, 12) if lanes.is_interpreted() else (700, 150)
    random = Random(num_under_way)
    model = ModelledCache(3 * num_slots, num_slots, device)
    for number in range(num_batches):
        size = random.randrange(1, num_slots)
        model.claim([int(len(model.truth) ** random.random()) - 1 for _ in range(size)])
        while len(model.under_way) >= num_under_way:
            model.train()
        if number % 10 == 0:
            model.check()
    model.write_dirty()
    model.check()
    counters = dict(zip(CacheCounter, model.plain.counters, strict=True))
    assert counters[CacheCounter.WRITTEN_ROWS] > num_slots
    assert 0 < counters[CacheCounter.UNIQUE_MISSES] < counters[CacheCounter.UNIQUE_ROWS]
