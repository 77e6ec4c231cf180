"""Random walks: whatever comes between the steps of pipelines, tables train as those on the device
do by hand."""

import copy
import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.disk_tables import (
    LOSS,
    NUM_IDS,
    assert_same_tables,
    batch,
    most_rows,
    tables_of,
)
from tests.support.raising_ranker import Mark, RaisingRanker, marked
from tests.support.tiny_model import step_by_hand
from torchembed import Disk, Dynamic, HostMemory
from torchembed.data import Batch
from torchembed.modules.table_module import TableModule
from torchembed.optim import Adam
from torchembed.tables import RowChunk, Storage, row_chunks, write_rows
from torchembed.training import TrainPipeline

CPU = torch.device("cpu")
NUM_STEPS = int(os.environ.get("TORCHEMBED_WALK_STEPS", "40"))
NUM_BATCHES = 40


def _most_rows_of_a_table() -> int:
    """Rows for each of two tables that share a cache, with which either has room for a batch of its
    own, and both for a batch."""
    every = [
        batch(n, is_jagged=is_jagged) for n in range(NUM_BATCHES) for is_jagged in (True, False)
    ]
    most = -(-most_rows(every) // 2)
    for one in every:
        offsets = one.sparse.offsets
        first, second, third, last = [0, 16, 24, 48] if offsets is None else offsets[::8].tolist()
        values = one.sparse.values
        of_a = torch.cat([values[first:second], values[third:last]])
        most = max(most, of_a.unique().numel(), values[second:third].unique().numel())
    return most


def _storages(folder: Path) -> dict[str, Callable[[], Storage | None]]:
    most = _most_rows_of_a_table()
    return {
        "device": lambda: None,
        "host, one batch": lambda: HostMemory(cache_rows=most),
        "host, two batches": lambda: HostMemory(cache_rows=2 * most),
        "disk, one batch": lambda: Disk(path=folder, cache_rows=most, host_rows=2 * most),
        "disk, two batches": lambda: Disk(path=folder, cache_rows=2 * most, host_rows=NUM_IDS),
    }


class Walk:
    """A model that a pipeline trains, and its twin on the device, trained by hand."""

    def __init__(
        self, seed: int, storage: Storage | None, dynamic: Dynamic | None, *, capture: bool
    ) -> None:
        self._random, self._capture = random.Random(seed), capture
        self._is_dynamic, self._is_on_disk = dynamic is not None, isinstance(storage, Disk)
        self.models = [RaisingRanker(of, dynamic=dynamic) for of in (storage, None)]
        self.optimizers = [Adam.with_dense(model.parameters(), lr=0.05) for model in self.models]
        self._saved: list[tuple[dict[str, object], dict[str, object]]] = []
        self._given: list[tuple[Mark | None, Batch]] = []
        self._iterator: Iterator[Batch] = iter(())
        self._has_trained = False
        self.open()

    def open(self) -> None:
        model, optimizer = self.models[0], self.optimizers[0]
        self.pipeline = TrainPipeline(
            model, LOSS, optimizer, device=CPU, capture=self._capture, self_check_every=None
        )

    def _batch(self) -> Batch:
        return batch(self._random.randrange(NUM_BATCHES), is_jagged=self._random.random() < 0.3)

    def step(self) -> None:
        """Train the next batch, or find that it raises."""
        if not self._given:
            # A dynamic table has no bad ids, and what raises is admitted all the same.
            marks = [None] if self._is_dynamic else [None] * 10 + list(Mark)
            count = self._random.choice([1, 2, 3, 5, 9])
            chosen = [self._random.choice(marks) for _ in range(count)]
            self._given = [(m, marked(self._batch(), m) if m else self._batch()) for m in chosen]
            self._iterator = iter([one for _, one in self._given])
        mark, one = self._given.pop(0)
        if mark:
            with pytest.raises(IndexError if mark is Mark.BAD_ID else RuntimeError):
                self.pipeline.progress(self._iterator)
        else:
            loss = self.pipeline.progress(self._iterator).loss.item()
            expected = step_by_hand(self.models[1], LOSS, [self.optimizers[1]], one).item()
            assert loss == expected
            self._has_trained = True

    def evaluate(self) -> None:
        one, outputs = self._batch(), []
        for model in self.models:
            model.eval()
            with torch.no_grad():
                outputs.append(model(one.dense, one.sparse))
            model.train()
        # Of a dynamic table, the next batch may have evicted ids by now.
        assert self._is_dynamic or torch.equal(*outputs)

    def freeze(self) -> None:
        """Freeze a table, or train it again; of dynamic ones, with no batch prepared."""
        number, is_trained = self._random.randrange(3), self._random.random() < 0.5
        if not (self._is_dynamic and self._given):
            for model in self.models:
                tables_of(model)[number].parameter.requires_grad_(is_trained)

    def close(self) -> None:
        """A prepared batch is admitted once more, which dynamic tables count."""
        if not (self._is_dynamic and self._given):
            self.pipeline.close()

    def reopen(self) -> None:
        if not (self._is_dynamic and self._given):
            self.pipeline.close()
            self._given = []
            self.open()

    def leave_out(self) -> None:
        """Leave the rest of an iterator out, of which a batch was prepared."""
        if not self._is_dynamic:
            self._given = []

    def train_by_hand(self) -> None:
        if not (self._is_dynamic and self._given):
            self.pipeline.close()
            one, pairs = self._batch(), zip(self.models, self.optimizers, strict=True)
            losses = [step_by_hand(model, LOSS, [of], one).item() for model, of in pairs]
            assert losses[0] == losses[1]

    def change(self) -> None:
        """Change a table in place."""
        number, factor = self._random.randrange(3), self._random.choice([0.5, 1.5])
        for model in self.models if not self._is_dynamic else ():
            table = tables_of(model)[number]
            if self._is_on_disk:
                for chunk in list(row_chunks(table, 1 << 10)):
                    write_rows(table, RowChunk(chunk.keys, chunk.rows * factor, chunk.states))
                continue
            for module in model.modules():
                if isinstance(module, TableModule):
                    module.write_back()
            with torch.no_grad():
                table.parameter.mul_(factor)

    def save(self) -> None:
        if not self._is_on_disk and not (self._is_dynamic and self._given):
            pairs = zip(self.models, self.optimizers, strict=True)
            self._saved = [copy.deepcopy((m.state_dict(), of.state_dict())) for m, of in pairs]

    def load(self) -> None:
        if not (self._is_dynamic and self._given):
            for n, (of_model, of_optimizer) in enumerate(self._saved):
                self.models[n].load_state_dict(copy.deepcopy(of_model))
                self.optimizers[n].load_state_dict(copy.deepcopy(of_optimizer))

    def set_lr(self) -> None:
        lr = self._random.choice([0.01, 0.05, 0.2])
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def compare(self) -> None:
        if self._has_trained and not (self._is_dynamic and self._given):
            assert_same_tables(*self.models)
            for one, other in zip(*map(tables_of, self.models), strict=True):
                found, expected = one.index_contents(), other.index_contents()
                for name in ("counters",) if found else ():
                    assert torch.equal(found[name], expected[name])

    def run(self, num_steps: int) -> list[str]:
        """Take ``num_steps`` steps, with anything between them; what was done, in order."""
        done: list[str] = []
        between = [
            *(self.evaluate, self.freeze, self.close, self.reopen, self.leave_out, self.compare),
            *(self.train_by_hand, self.change, self.save, self.load, self.set_lr),
        ]
        while done.count("step") < num_steps:
            action = self.step if self._random.random() < 0.6 else self._random.choice(between)
            done.append(action.__name__)
            try:
                action()
            except BaseException as error:
                error.add_note(f"after {', '.join(done)}")
                raise
        while self._given:
            self.step()
        self.compare()
        self.pipeline.close()
        return done


CASES = [
    *((storage, None) for storage in _storages(Path())),
    *((storage, Dynamic()) for storage in ("device", "host, one batch", "disk, two batches")),
    ("device", Dynamic(initial_capacity=8)),
]


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize(("storage", "dynamic"), CASES)
def test_tables_train_as_on_the_device_by_hand(
    storage: str, dynamic: Dynamic | None, capture: bool, tmp_path: Path
) -> None:
    made = _storages(tmp_path)[storage]()
    seed = int(os.environ.get("TORCHEMBED_WALK_SEED", "0"))
    with warnings.catch_warnings():
        # Of models that change again and again, whose steps are eager then.
        warnings.simplefilter("ignore", UserWarning)
        Walk(seed, made, dynamic, capture=capture).run(NUM_STEPS)
