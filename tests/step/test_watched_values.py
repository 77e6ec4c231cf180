"""Values that Python changes train in a pipeline as in a loop by hand."""

import collections
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import (
    Case,
    assert_equal_rows,
    held_rows,
    make_model,
    make_optimizer,
)
from tests.support.steps_on_ranks import (
    MIXED,
    NO_RANK,
    WithLoss,
    static_batch,
    train_plainly,
)
from tests.support.tape import taped_captures
from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers, step_by_hand
from tests.support.tiny_training import LOSS, assert_same_state, state_of
from torchembed.core.ranks import joint_notices
from torchembed.step.watches.watched_values import WatchedValues
from torchembed.training import TrainPipeline

Optimizers = Sequence[torch.optim.Optimizer]
AfterStep = Callable[[nn.Module, Optimizers, int], None]
NUM_STEPS = 24


@pytest.fixture(autouse=True)
def _taped() -> Iterator[None]:
    with taped_captures():
        yield


def joint(model: nn.Module) -> Optimizers:
    return [torchembed.optim.Adam.with_dense(model.parameters(), lr=0.125)]


class Deep(TinyModel):
    """Deep, with a value of Python that scales its vectors."""

    def __init__(self) -> None:
        super().__init__(is_deep=True)
        self.scale = 0.5
        self.register_buffer("mean", torch.zeros(8))
        self.weights = [1.0, 2.0]
        self.factors = np.array([1.0, 2.0])
        self.steps = [np.array(0.5)]
        self.noise = nn.Dropout(0.0)

    def change(self, vectors: Tensor) -> Tensor:
        vectors = vectors * float(self.factors[0]) + float(self.steps[0])
        return self.noise(vectors) * self.scale * self.weights[0] - self.mean

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        vectors = self.change(self.tables(sparse).values())
        return self.dense(torch.cat([dense, vectors], dim=1))


def trained_alike(
    make_model: Callable[[], nn.Module],
    make: Callable[[nn.Module], Optimizers],
    after_step: Callable[[], AfterStep],
) -> tuple[TrainPipeline, list[str]]:
    """Train by hand and by a pipeline, and hold that both are equal; the pipeline, and the texts of
    its warnings."""
    batches = fixed_batches(NUM_STEPS)
    by_hand = make_model()
    optimizers, after, losses = make(by_hand), after_step(), []
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        losses.append(step_by_hand(by_hand, LOSS, optimizers, batch).item())
        after(by_hand, optimizers, number)
    model = make_model()
    optimizers, after, found = make(model), after_step(), []
    torch.manual_seed(1)
    pipeline, iterator = TrainPipeline(model, LOSS, optimizers, capture=True), iter(batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(NUM_STEPS):
            found.append(pipeline.progress(iterator).loss.item())
            after(model, optimizers, number)
    assert found == losses
    assert_same_state(model, state_of(by_hand))
    return pipeline, [str(warning.message) for warning in caught]


EAGER = "the train step could not be captured as a CUDA graph, so it runs eagerly from now on: {}"
CHANGES = ": it changes from step to step, which no graph follows"


class SetsAttributes(Deep):
    """Its forward rebinds a buffer, counts, or lets a container grow."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.seen = kind, collections.deque([0.0], maxlen=4)
        self.history: list[Tensor] = []
        self.count = 0

    def change(self, vectors: Tensor) -> Tensor:
        if self.kind == "buffer":
            self.mean = 0.9 * self.mean + 0.1 * vectors.detach().mean(0)
        elif self.kind == "counter":
            self.count += 1
            return vectors / self.count
        elif self.kind == "list":
            self.history.append(vectors.detach())
            return vectors + sum(self.history) / len(self.history)
        elif self.kind == "array":
            self.factors += 0.5
        elif self.kind == "deque":
            self.seen.append(self.seen[-1] + 0.5)
            return vectors * sum(self.seen)
        return super().change(vectors)


@pytest.mark.parametrize("make", [make_optimizers, joint])
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("buffer", "mean of model SetsAttributes"),
        ("counter", "count of model SetsAttributes"),
        ("list", "contents of history of model SetsAttributes"),
        ("deque", "contents of seen of model SetsAttributes"),
        ("array", "contents of factors of model SetsAttributes"),
    ],
)
def test_what_forward_rebinds_trains_eagerly(
    kind: str, where: str, make: Callable[[nn.Module], Optimizers]
) -> None:
    def read() -> AfterStep:
        def after_step(model: nn.Module, _: Optimizers, number: int) -> None:
            assert isinstance(model, SetsAttributes)
            if kind == "counter":
                assert model.count == number + 1

        return after_step

    pipeline, texts = trained_alike(lambda: SetsAttributes(kind), make, read)
    assert texts == [EAGER.format(where + CHANGES)]
    assert pipeline.num_captures == 0


EachStep = Callable[[Any, Optimizers, int], None]


def set_at(step: int, change: EachStep) -> EachStep:
    """``change`` after one step only."""

    def after_step(model: nn.Module, optimizers: Optimizers, number: int) -> None:
        if number == step:
            change(model, optimizers, number)

    return after_step


def scale(model: Any, _: Optimizers, number: int) -> None:
    model.scale = 0.5 / (number + 1)


def replace_buffer(model: Any, _: Optimizers, number: int) -> None:
    model.mean = torch.full((8,), float(number))


def change_list(model: Any, _: Optimizers, number: int) -> None:
    model.weights[0] = 1.0 + number


def change_array(model: Any, _: Optimizers, number: int) -> None:
    model.factors[0] = 1.0 + number


def change_array_in_list(model: Any, _: Optimizers, number: int) -> None:
    model.steps[0].fill(1.0 + number)


def change_dropout(model: Any, _: Optimizers, number: int) -> None:
    model.noise.p = 0.01 * number


def change_betas(_: Any, optimizers: Optimizers, number: int) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["betas"] = (0.9 - 0.01 * number, 0.99)


def change_decay(_: Any, optimizers: Optimizers, number: int) -> None:
    optimizers[0].param_groups[0]["weight_decay"] = 0.01 * number


def replace_module(model: Any, _: Optimizers, number: int) -> None:
    model.noise = nn.Softsign() if number % 2 else nn.Tanh()


ADAM = "of parameter group 0 of optimizer 0, Adam"
BETWEEN_STEPS: dict[str, tuple[EachStep, str]] = {
    "an attribute": (scale, "scale of model Deep"),
    "a buffer": (replace_buffer, "mean of model Deep"),
    "an item of a list": (change_list, "contents of weights of model Deep"),
    "elements of an array": (change_array, "contents of factors of model Deep"),
    "an array in a list": (change_array_in_list, "contents of item 0 of steps of model Deep"),
    "a module's number": (change_dropout, "p of module noise"),
    "betas": (change_betas, f"betas {ADAM}"),
    "weight decay": (change_decay, f"weight_decay {ADAM}"),
    "a module": (replace_module, "noise of model Deep"),
}


@pytest.mark.parametrize("case", BETWEEN_STEPS)
def test_what_is_changed_between_steps_once_is_captured_anew(case: str) -> None:
    change, _ = BETWEEN_STEPS[case]
    pipeline, texts = trained_alike(Deep, joint, lambda: set_at(9, change))
    assert texts == []
    assert pipeline.engine.is_captured
    assert pipeline.num_captures == 4


@pytest.mark.parametrize("first", [0, 9])
@pytest.mark.parametrize("case", BETWEEN_STEPS)
def test_what_is_changed_between_all_steps_trains_eagerly(case: str, first: int) -> None:
    change, where = BETWEEN_STEPS[case]

    def after_step(model: nn.Module, optimizers: Optimizers, number: int) -> None:
        if number >= first:
            change(model, optimizers, number)

    pipeline, texts = trained_alike(Deep, joint, lambda: after_step)
    assert texts == [EAGER.format(where + CHANGES)]
    assert pipeline.num_captures <= 2


def test_momentum_that_a_scheduler_cycles_trains_eagerly() -> None:
    def cycled() -> AfterStep:
        schedulers: list[OneCycleLR] = []

        def after_step(_: nn.Module, optimizers: Optimizers, number: int) -> None:
            if not schedulers:
                schedulers.append(OneCycleLR(optimizers[0], max_lr=0.25, total_steps=NUM_STEPS))
            schedulers[0].step()

        return after_step

    _, texts = trained_alike(Deep, joint, cycled)
    assert texts == [EAGER.format(f"betas {ADAM}" + CHANGES)]


def test_a_parameter_group_that_is_added_is_trained() -> None:
    def frozen_head() -> nn.Module:
        model = Deep()
        model.dense[0].requires_grad_(False)
        return model

    def add_group(model: Any, optimizers: Optimizers, _: int) -> None:
        model.dense[0].requires_grad_(True)
        optimizers[1].add_param_group({"params": list(model.dense[0].parameters()), "lr": 0.5})

    def without_head(model: nn.Module) -> Optimizers:
        of_tables, dense = make_optimizers(model)
        head = set(model.dense[0].parameters())  # type: ignore[index]
        others = [p for p in dense.param_groups[0]["params"] if p not in head]
        return [of_tables, torch.optim.Adam(others, lr=0.125)]

    pipeline, texts = trained_alike(frozen_head, without_head, lambda: set_at(9, add_group))
    assert texts == []
    assert pipeline.num_captures == 4


class ReadsLargeArray(Deep):
    """Reads the first element of an array that is not compared at each step."""

    def __init__(self, *, is_read: bool, is_writeable: bool = True) -> None:
        super().__init__()
        self.large, self.is_read = np.full(1 << 20, 0.5), is_read
        self.large.setflags(write=is_writeable)

    def change(self, vectors: Tensor) -> Tensor:
        return vectors * float(self.large[0]) if self.is_read else super().change(vectors)


def test_a_large_array_that_forward_reads_is_not_captured() -> None:
    def change(model: Any, _: Optimizers, number: int) -> None:
        model.large[0] = 1.0 + number

    pipeline, (text,) = trained_alike(
        lambda: ReadsLargeArray(is_read=True), joint, lambda: set_at(9, change)
    )
    assert text.startswith(EAGER.format("large of model ReadsLargeArray: forward reads an array"))
    assert pipeline.num_captures == 0


@pytest.mark.parametrize(("is_read", "is_writeable"), [(False, True), (True, False)])
def test_a_large_array_that_does_not_change_is_captured(is_read: bool, is_writeable: bool) -> None:
    def make() -> nn.Module:
        return ReadsLargeArray(is_read=is_read, is_writeable=is_writeable)

    pipeline, texts = trained_alike(make, joint, lambda: set_at(9, lambda *_: None))
    assert (pipeline.num_captures, texts) == (2, [])


@pytest.mark.parametrize(
    ("device", "changes"), [("cpu", [0, 0]), ("cuda", [1, 1])], ids=["of the host", "of a GPU"]
)
def test_tensors_of_the_host_are_compared_where_steps_run_elsewhere(
    device: str, changes: list[int]
) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.tensor(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    model = Scaled()
    values, found = WatchedValues(model, [], [], device=torch.device(device)), []
    for change in (lambda: model.factor.fill_(2.0), lambda: None):
        change()
        values.look()
        found.append(values.version)
    assert found == changes


CASE = Case(placements=MIXED, fixed=True)
LONG = 18


class Counts(WithLoss):
    """Counts its calls on one rank, where ``counts``."""

    counts, calls, note = False, 0, 0

    def forward(self, features: torchembed.SparseFeatures) -> Tensor:
        if self.counts:
            self.calls += 1
        assert self.note
        return super().forward(features)


def train_with_changes_of_one_rank(counts: bool) -> dict[str, Any]:
    """On a rank of gloo: its rows, the kinds of its steps, and what it was warned of."""
    rank, kinds = dist.get_rank(), list[str]()
    model = make_model(CASE, "meta")
    torchembed.shard_embeddings(model, CASE.mesh(), CASE.plan(dist.get_world_size()))
    with_loss, optimizer = Counts(model), make_optimizer(CASE, model)
    with_loss.counts, with_loss.note = counts and rank == 1, 1
    batches = (static_batch(CASE, rank, step, NO_RANK) for step in range(LONG))
    with (
        warnings.catch_warnings(record=True) as caught,
        TrainPipeline(with_loss, None, [optimizer], device="cpu", capture=True) as pipeline,
    ):
        warnings.simplefilter("always")
        for step in range(LONG):
            if step == 6 and rank == 1 and not counts:
                with_loss.note = 2
            kinds.append(str(pipeline.progress(batches).kind.form))
        num_captures = pipeline.num_captures
    texts = [str(warning.message) for warning in caught]
    return {
        "rows": held_rows(model),
        "kinds": kinds,
        "texts": texts,
        "num_captures": num_captures,
    }


def changes_of_one_rank() -> list[dict[str, Any]]:
    with mock.patch.object(joint_notices, "PATIENCE_SECONDS", 0.5):
        return [train_with_changes_of_one_rank(counts) for counts in (True, False)]


def test_changes_of_one_rank_concern_all() -> None:
    expected = train_plainly(CASE, 2, NO_RANK, num_steps=LONG)
    counted, replaced = zip(*run_on_ranks(2, changes_of_one_rank), strict=True)
    for results in (counted, replaced):
        assert_equal_rows([result["rows"] for result in results], expected, str(CASE))
    assert [result["kinds"] for result in counted] == [["eager"] * LONG] * 2
    assert [result["num_captures"] for result in counted] == [1, 0]
    assert [result["texts"] for result in counted] == [
        [EAGER.format("another rank failed, whose warning says why")],
        [EAGER.format("calls of model Counts" + CHANGES)],
    ]
    # Two batches had been read and agreed on; the next one begins anew, on both ranks.
    kinds = replaced[0]["kinds"]
    assert kinds[:9] == ["eager"] * 4 + ["graph"] * 4 + ["eager"]
    assert kinds[-1] == "graph"
    assert replaced[1]["kinds"] == kinds
    assert [result["num_captures"] for result in replaced] == [4, 4]
    assert replaced[0]["texts"] == []
    assert ["note of model Counts: it has changed" in text for text in replaced[1]["texts"]] == [
        True
    ]
