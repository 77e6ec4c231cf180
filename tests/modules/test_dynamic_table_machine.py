"""Any sequence of what is done with modules leaves their dynamic tables with what arrays hold.

``TORCHEMBED_HASH_TABLE_OPERATIONS`` says how many ids the long sequence of each policy is given, as
in ``tests/ops/test_hash_table_machine.py``.
"""

import os
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
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

import torchembed
from tests.support.dynamic_table_model import ModelledModule, admission_of
from torchembed import LFU, LRU, CallerScores, Dynamic, EpochLFU, HostMemory

SMALL = np.array([-(2**63), -(2**40), -1, *range(24), 2**31, 2**63 - 1])
"""The least and the greatest ids are among them, and those that others take for no id."""
PLACES = st.lists(st.integers(0, len(SMALL) - 1), min_size=1, max_size=9).map(np.array)
NUMBERS = st.integers(0, 1)
CAPACITIES = st.sampled_from([1, 4, 9, 140])
POLICIES = {
    "lru": LRU(),
    "lfu": LFU(),
    "epoch_lfu": EpochLFU(steps_per_epoch=3),
    "caller": CallerScores(initial_score=2),
}
OPTIMIZERS = {"sgd": torchembed.optim.SGD, "adagrad": torchembed.optim.Adagrad}


class DynamicTableMachine(RuleBasedStateMachine):
    """Two tables of one policy."""

    policy: str
    device: torch.device

    @initialize(
        capacity=CAPACITIES,
        threshold=st.sampled_from([1, 3]),
        ttl_steps=st.sampled_from([None, 2, 4]),
        deletion_log=st.sampled_from([3, 1000]),
        missing=st.sampled_from(["zeros", "initial", (0.5, -2.0)]),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        storage=st.sampled_from([None, HostMemory(cache_rows=9)]),
        follows_always=st.booleans(),
    )
    def make(
        self,
        capacity: int,
        threshold: int,
        ttl_steps: int | None,
        deletion_log: int,
        missing: str | tuple[float, ...],
        optimizer: str,
        storage: HostMemory | None,
        follows_always: bool,
    ) -> None:
        self.follows_always = follows_always
        self.folder = Path(tempfile.mkdtemp())
        dynamic = Dynamic(
            eviction=POLICIES[self.policy],
            admission=admission_of(threshold, SMALL),
            ttl_steps=ttl_steps,
            sweep_steps=1000 if ttl_steps is None else 1,
            deletion_log=deletion_log,
            missing=missing,
        )
        make = OPTIMIZERS[optimizer]
        self.model = ModelledModule(SMALL, capacity, dynamic, make, self.device, storage)

    @rule(a=PLACES, b=PLACES)
    def train(self, a: np.ndarray, b: np.ndarray) -> None:
        self.model.train(a, np.resize(b, len(a)))

    @rule(places=PLACES)
    def train_again(self, places: np.ndarray) -> None:
        for _ in range(3):
            self.model.train(places, places)

    @rule(a=PLACES, b=PLACES)
    def evaluate(self, a: np.ndarray, b: np.ndarray) -> None:
        self.model.evaluate(a, np.resize(b, len(a)))

    @rule(number=NUMBERS, max_rows=st.integers(0, 9))
    def evict(self, number: int, max_rows: int) -> None:
        self.model.evict(number, max_rows)

    @rule(number=NUMBERS, places=PLACES)
    def erase(self, number: int, places: np.ndarray) -> None:
        self.model.erase(number, places)

    @precondition(lambda self: self.policy == "caller")
    @rule(number=NUMBERS, score=st.sampled_from([None, -(2**63), 1, 2, 2**63 - 1]))
    def set_score(self, number: int, score: int | None) -> None:
        self.model.set_score(number, score)

    @precondition(lambda self: self.policy == "caller")
    @rule(number=NUMBERS, places=PLACES, first=st.integers(-9, 9))
    def assign_scores(self, number: int, places: np.ndarray, first: int) -> None:
        self.model.assign_scores(number, places, np.arange(first, first + len(places)))

    @rule()
    def follow(self) -> None:
        self.model.follow()

    @rule(places=PLACES, has_files=st.sampled_from([False] * 4 + [True]))
    def take_up(self, places: np.ndarray, has_files: bool) -> None:
        if has_files:
            self.model.restore(self.folder)
        else:
            self.model.reload(places)

    @rule(capacity=CAPACITIES, max_bytes=st.sampled_from([1, 1000]))
    def move(self, capacity: int, max_bytes: int) -> None:
        self.model.move(capacity, max_bytes)

    @invariant()
    def holds_what_the_arrays_hold(self) -> None:
        if hasattr(self, "model"):
            self.model.check()
            if self.follows_always:
                self.model.follow()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


@pytest.mark.parametrize("policy", POLICIES)
def test_modules_hold_what_arrays_hold(policy: str, device: torch.device) -> None:
    machine = type("Machine", (DynamicTableMachine,), {"policy": policy, "device": device})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=15, stateful_step_count=20, derandomize=True, database=None),
    )


def run_random_operations(
    model: ModelledModule, num_operations: int, max_batch: int, folder: Path
) -> None:
    """Batches of skewed ids, drifting, so that tables are full of ids that went cold."""
    random = np.random.default_rng(model.capacity)
    num_ids = len(model.universe)
    order, window = random.permutation(num_ids), num_ids // 2
    capacities = model.capacity, 2 * model.capacity // 3
    num_batches = 0
    while model.num_operations < num_operations:
        num_batches += 1
        size = random.integers(1, max_batch)
        drift = num_batches * num_ids // 500
        a, b = order[(drift + (window ** random.random((2, size))).astype(np.int64)) % num_ids]
        number = int(random.integers(2))
        match random.random():
            case kind if kind < 0.8:
                model.train(a, b)
            case kind if kind < 0.88:
                model.evaluate(a, b)
                if isinstance(model.dynamic.eviction, CallerScores):
                    model.set_score(number, int(random.integers(9)))
                    model.assign_scores(1 - number, a, random.integers(9, size=len(a)))
            case kind if kind < 0.91:
                model.erase(number, a[:40])
            case kind if kind < 0.93:
                model.evict(number, int(random.integers(model.capacity // 2, model.capacity)))
            case kind if kind < 0.97:
                model.follow()
            case kind if kind < 0.98:
                model.reload(a)
            case kind if kind < 0.99:
                model.restore(folder / str(num_batches))
                shutil.rmtree(folder / str(num_batches))
            case _:
                model.move(capacities[int(random.integers(2))], max_bytes=32 * max_batch)
        model.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_sequence(policy: str, device: torch.device, tmp_path: Path) -> None:
    num_operations = int(os.environ.get("TORCHEMBED_HASH_TABLE_OPERATIONS", "20000"))
    is_long = device.type == "cuda" and num_operations > 10**6
    num_ids = 400_000 if is_long else 20_000
    bits = np.iinfo(np.int64)
    drawn = np.random.default_rng(0).integers(bits.min, bits.max, num_ids, endpoint=True)
    universe = np.unique(np.concatenate([SMALL, drawn]))
    grows = policy == "lru"
    ttl_steps = None if policy == "lfu" or grows else 60
    dynamic = Dynamic(
        eviction=POLICIES[policy],
        admission=admission_of(1 if policy == "lru" else 2, universe),
        ttl_steps=ttl_steps,
        sweep_steps=1000 if ttl_steps is None else 1,
        deletion_log=num_ids // 4,
        initial_capacity=num_ids // 16 if grows else None,
        missing="zeros" if policy == "lru" else "initial",
    )
    make = OPTIMIZERS["adagrad" if policy == "lfu" else "sgd"]
    model = ModelledModule(universe, num_ids // (2 if grows else 8), dynamic, make, device)
    num_rows = model.num_rows()
    # What is checked after each batch takes as long as the universe is large.
    max_batch = num_ids // (10 if is_long else 40)
    run_random_operations(model, num_operations, max_batch, tmp_path)
    assert (model.num_rows() > num_rows) == grows
