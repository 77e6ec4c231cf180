"""Any sequence of operations leaves hash tables with what Python dicts hold.

``TORCHEMBED_HASH_TABLE_OPERATIONS`` says how many keys the long sequence of each policy is given:
2,500,000, which are 10 million in all, take about ten minutes with the C++ kernels.
"""

import os
from random import Random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.support import lanes
from tests.support.hash_table_model import ModelledTables
from tests.support.hash_tables import EXTREME_KEYS
from tests.support.sizes import Sizes
from torchembed.ops.hash_table import Policy, TableShape, table_shape

KEYS = st.one_of(st.integers(0, 30), st.sampled_from(EXTREME_KEYS))
SHAPES = st.sampled_from(
    [TableShape(1, 1, 2), TableShape(1, 2, 3), TableShape(2, 3, 2), table_shape(40)]
)
IDS = st.lists(st.tuples(KEYS, st.integers(-1, 1), st.integers(-9, 9)), max_size=24)
Ids = list[tuple[int, int, int]]


class HashTableMachine(RuleBasedStateMachine):
    """Two tables of one policy."""

    policy: Policy
    device: torch.device

    @initialize(shapes=st.tuples(SHAPES, SHAPES))
    def make(self, shapes: tuple[TableShape, TableShape]) -> None:
        self.model = ModelledTables(shapes, self.policy, self.device)

    def _batch(self, ids: Ids) -> tuple[torch.Tensor, list[int], list[int]]:
        keys = torch.tensor([key for key, _, _ in ids], dtype=torch.int64, device=self.device)
        return keys, [table for _, table, _ in ids], [score for _, _, score in ids]

    @rule(ids=IDS)
    def find(self, ids: Ids) -> None:
        self.model.find(*self._batch(ids)[:2])

    @rule(
        ids=IDS, num_under_way=st.integers(0, 3), is_trained=st.sampled_from([True] * 4 + [False])
    )
    def train(self, ids: Ids, num_under_way: int, is_trained: bool) -> None:
        keys, tables, scores = self._batch(ids)
        self.model.train(
            keys, tables, scores=scores, num_under_way=num_under_way, is_trained=is_trained
        )

    @rule()
    def begin_epoch(self) -> None:
        self.model.epoch_number += 1

    @rule(ids=IDS)
    def erase(self, ids: Ids) -> None:
        self.model.erase(*self._batch(ids)[:2])

    @rule(ids=IDS)
    def assign(self, ids: Ids) -> None:
        if self.policy is not Policy.LRU:
            self.model.assign(*self._batch(ids))

    @rule(table=st.integers(0, 1), age=st.integers(0, 5))
    def expire(self, table: int, age: int) -> None:
        self.model.expire(table, self.model.epoch - age)

    @rule(table=st.integers(0, 1), num_kept=st.integers(0, 12))
    def shrink(self, table: int, num_kept: int) -> None:
        self.model.shrink(table, num_kept)

    @rule(table=st.integers(0, 1))
    def grow(self, table: int) -> None:
        if self.model.tables.shapes[table].num_blocks < 8:
            self.model.grow(table)

    @invariant()
    def holds_what_the_dicts_hold(self) -> None:
        if hasattr(self, "model"):
            self.model.check()


@pytest.mark.parametrize("policy", list(Policy))
def test_holds_what_dicts_hold(policy: Policy, device: torch.device, sizes: Sizes) -> None:
    machine = type("Machine", (HashTableMachine,), {"policy": policy, "device": device})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=sizes.num_examples // 2,
            stateful_step_count=20,
            derandomize=True,
            database=None,
        ),
    )


def run_random_operations(model: ModelledTables, num_operations: int, seed: int) -> None:
    """Batches of skewed keys, drifting, so that tables are full of keys that went cold."""
    random = Random(seed)
    num_keys = sum(shape.num_rows for shape in model.tables.shapes) * 3
    num_batches = 0
    while model.num_operations < num_operations:
        num_batches += 1
        size = random.randrange(1, 400)
        drift = num_batches * num_keys // 300
        keys = torch.tensor(
            [drift + int(num_keys ** random.random()) for _ in range(size)], device=model.device
        )
        tables = random.choices((-1, 0, 1), (1, 9, 9), k=size)
        scores = [random.randrange(-50, 50 + num_batches) for _ in range(size)]
        kind = random.random()
        table = random.randrange(2)
        model.epoch_number = num_batches // 5
        if kind < 0.7:
            is_trained = random.random() < 0.9
            model.train(
                keys,
                tables,
                scores=scores,
                num_under_way=random.randrange(4),
                is_trained=is_trained,
            )
        elif kind < 0.85:
            model.find(keys, tables)
        elif kind < 0.92:
            model.erase(keys[:40], tables[:40])
        elif kind < 0.95:
            model.expire(table, model.epoch - random.randrange(5, 200))
        elif kind < 0.97:
            shape = model.tables.shapes[table]
            model.shrink(table, random.randrange(shape.num_rows // 2, shape.num_rows))
        elif model.policy is not Policy.LRU:
            model.assign(keys, tables, scores)
        if num_batches % 100 == 0:
            model.check(piece=1000)
            if model.tables.shapes[table].num_blocks < 8:
                model.grow(table)
    model.check(piece=1000)


@pytest.mark.parametrize("policy", list(Policy))
def test_a_long_sequence(policy: Policy, device: torch.device) -> None:
    shapes = [TableShape(1, 8, 32), table_shape(1000, 300, block_slots=300)]
    if lanes.is_interpreted():
        shapes = [TableShape(1, 4, 32), table_shape(500, 150, block_slots=150)]
    asked = os.environ.get("TORCHEMBED_HASH_TABLE_OPERATIONS")
    if asked is not None:
        num_operations = int(asked)
    else:
        is_reference = lanes.picked_kernel("insert_keys", device) == "reference"
        num_operations = 500 if lanes.is_interpreted() else 1000 if is_reference else 20_000
    model = ModelledTables(shapes, policy, device)
    run_random_operations(model, num_operations, seed=int(policy))
