"""Our pipeline follows what is changed of it between steps, and hands its batches on."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.tolerance import assert_within_drift
from tests.support.torchrec_cases import ADAGRAD, MIXED, SETTINGS, log_lines, optimizer_class
from tests.support.torchrec_pipelines import batches, make_pipeline

NUM_STEPS = 12
PLACES = {
    "parameter": "parameter over.0.weight has hooks, or an optimizer, in backward",
    "wrapper": "its DistributedModelParallel has hooks",
}
HEAD = "TorchRec's TrainPipelineSparseDist trains, since "


def make(whose: str, **arguments: Any) -> Any:
    from tests.support.torchrec_training import make_run

    return make_run(
        whose,
        torch.device("cpu"),
        MIXED["placements"],
        optimizer_class(ADAGRAD),
        SETTINGS[ADAGRAD],
        for_pipeline=True,
        **arguments,
    )


def losses_of(pipeline: Any, stream: Iterator[Any], count: int) -> list[float]:
    return [float(pipeline.progress(stream)[0]) for _ in range(count)]


def numbered(run: Any, count: int) -> list[Any]:
    """Batches whose labels are their numbers."""
    found = list(batches(run, count, is_fixed=True))
    for number, batch in enumerate(found):
        batch.labels.fill_(number)
    return found


def numbers_of(pipeline: Any, stream: Iterator[Any], count: int) -> list[int]:
    return [int(pipeline.progress(stream)[2][0]) for _ in range(count)]


class Wrapped:
    """An optimizer that is no ``torch.optim.Optimizer``, as TorchRec's wrapper that accumulates
    gradients is none."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.zero_grad, self.step = optimizer.zero_grad, optimizer.step


def other_optimizer(run: Any) -> torch.optim.Optimizer:
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    dense = dict(in_backward_optimizer_filter(run.model.named_parameters()))
    of_dense = KeyedOptimizerWrapper(dense, functools.partial(torch.optim.Adagrad, lr=0.03))
    return CombinedOptimizer([run.model.fused_optimizer, of_dense])


def changed_optimizers(whose: str, **arguments: Any) -> tuple[list[str], list[float]]:
    """The log's lines and the losses of steps on one iterator, between which the model is detached
    and attached, the optimizer replaced, then wrapped; and on another."""
    run = make(whose, **arguments)
    with log_lines() as lines:
        pipeline, stream = make_pipeline(whose, run), batches(run, 10, is_fixed=True)
        found = losses_of(pipeline, stream, 2)
        pipeline.attach(pipeline.detach())
        found += losses_of(pipeline, stream, 2)
        pipeline._optimizer = other_optimizer(run)
        found += losses_of(pipeline, stream, 3)
        pipeline._optimizer = Wrapped(pipeline._optimizer)
        found += losses_of(pipeline, stream, 3)
        with pytest.raises(StopIteration):
            pipeline.progress(stream)
        found += losses_of(pipeline, batches(run, 2, is_fixed=False, first=10), 2)
    return lines, found


def attached(whose: str, **arguments: Any) -> list[float]:
    """Losses of a model's steps, and of those of another that is attached after them."""
    first, second = make(whose, **arguments), make(whose, **arguments)
    given = list(batches(first, NUM_STEPS, is_fixed=True))
    if whose == "theirs":
        streams = iter(given[:5]), iter(given[5:])
        return [
            *losses_of(make_pipeline(whose, first), streams[0], 5),
            *losses_of(make_pipeline(whose, second), streams[1], NUM_STEPS - 5),
        ]
    pipeline, stream = make_pipeline(whose, first), iter(given)
    found = losses_of(pipeline, stream, 5)
    pipeline.attach(second.model)
    pipeline._optimizer = second.optimizer
    return found + losses_of(pipeline, stream, NUM_STEPS - 5)


def hooked(whose: str, **arguments: Any) -> tuple[list[str], list[float], int]:
    """The log's lines, the losses, and how often a hook of backward was called, which is there from
    the fourth step on."""
    from torchrec.distributed.train_pipeline.backward_injection import (
        FirstGradTensorFinder,
        InjectionSite,
    )

    run = make(whose, **arguments)
    calls: list[object] = []
    with log_lines() as lines:
        pipeline, stream = make_pipeline(whose, run), batches(run, NUM_STEPS, is_fixed=True)
        found = losses_of(pipeline, stream, 3)
        pipeline.register_backward_hook(
            InjectionSite("over.0", FirstGradTensorFinder()), calls.append
        )
        found += losses_of(pipeline, stream, NUM_STEPS - 3)
    assert calls == [pipeline] * len(calls)
    return lines, found, len(calls)


def hooked_otherwise(place: str) -> tuple[list[str], int]:
    """The log's lines, and how often a hook of torch's in a ``place`` was called, which is there
    for the last 3 steps."""
    run = make("ours")
    calls: list[object] = []
    with log_lines() as lines:
        pipeline, stream = make_pipeline("ours", run), batches(run, 6, is_fixed=True)
        losses_of(pipeline, stream, 3)
        if place == "parameter":
            parameter = next(iter(run.model.module.over.parameters()))
            parameter.register_hook(calls.append)
        else:
            run.model.register_forward_pre_hook(lambda *_: calls.append(None))
        losses_of(pipeline, stream, 3)
    return lines, len(calls)


def by_stages(whose: str, **arguments: Any) -> tuple[list[str], list[float]]:
    """The log's lines and the losses where a script fills the pipeline after some steps."""
    run = make(whose, **arguments)
    with log_lines() as lines:
        pipeline, stream = make_pipeline(whose, run), batches(run, NUM_STEPS, is_fixed=True)
        found = losses_of(pipeline, stream, 3)
        pipeline.fill_pipeline(stream)
        assert len(pipeline.batches) == len(pipeline.contexts) == 2
        found += losses_of(pipeline, stream, NUM_STEPS - 3)
        with pytest.raises(StopIteration):
            pipeline.progress(stream)
    return lines, found


def orders() -> dict[str, list[int]]:
    """Numbers of the batches of steps: where the optimizer is replaced between them, where it is
    wrapped and another iterator given, and where the pipeline is reset; then how many were read
    before it was."""
    run = make("ours")
    pipeline, stream = make_pipeline("ours", run), iter(numbered(run, 8))
    replaced = numbers_of(pipeline, stream, 3)
    pipeline._optimizer = other_optimizer(run)
    replaced += numbers_of(pipeline, stream, 5)

    pipeline, stream = make_pipeline("ours", run), iter(numbered(run, 8))
    wrapped = numbers_of(pipeline, stream, 3)
    pipeline._optimizer = Wrapped(run.optimizer)
    other = iter(numbered(run, 2))
    with contextlib.suppress(StopIteration):
        while True:
            wrapped += numbers_of(pipeline, other, 1)
    # Only now, when the thread that reads has left the iterator.
    num_read = 8 - len(list(stream))

    pipeline, given = make_pipeline("ours", run), numbered(run, 12)
    stream = iter(given)
    reset = numbers_of(pipeline, stream, 3)
    pipeline.reset()
    first = next(stream)
    reset += numbers_of(pipeline, stream, 11 - int(first.labels[0]))
    return {"replaced": replaced, "wrapped": wrapped, "reset": reset, "read": [num_read]}


def two_pipelines(whose: str, **arguments: Any) -> list[float]:
    """Losses of steps on several iterators, of which every other is another pipeline's of the same
    model, evaluated the first time; of TorchRec's own, one pipeline does it all."""
    run = make(whose, **arguments)
    first = make_pipeline(whose, run)
    second = first if whose == "theirs" else make_pipeline(whose, run)
    found, begin = [], 0
    for number, count in enumerate((3, 2, 3, 2, 2)):
        run.model.train(number != 1)
        stream = batches(run, count, is_fixed=True, first=begin)
        found += losses_of(second if number % 2 else first, stream, count)
        begin += count
    return found


COMPARED: tuple[Callable[..., Any], ...] = (
    changed_optimizers,
    attached,
    hooked,
    by_stages,
    two_pipelines,
)


def everything_on_the_cpu() -> dict[str, Any]:
    """On a rank: each with steps as on the CPU, and with those that are captured on a GPU, which
    read ahead."""
    from torchembed.integrations.torchrec.pipeline import steps

    found: dict[str, Any] = {}
    for whose in ("theirs", "nudged"):
        nudged = {"nudged": whose == "nudged"}
        found[whose] = [f("theirs", **nudged) for f in COMPARED]
    found["eager"] = [f("ours") for f in COMPARED], orders()
    captured = functools.partial(steps.TrainPipeline, capture=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "TrainPipeline", captured)
        found["places"] = {place: hooked_otherwise(place) for place in PLACES}
        found["captured"] = [f("ours") for f in COMPARED], orders()
    return found


@pytest.fixture(scope="module")
def ranks(cpu_answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [answer["pipeline_changes"] for answer in cpu_answers]


KINDS = pytest.mark.parametrize("kind", ["eager", "captured"])


@KINDS
def test_models_and_optimizers_may_be_replaced(ranks: list[dict[str, Any]], kind: str) -> None:
    for number, rank in enumerate(ranks):
        (lines, ours), of_attached, *_ = rank[kind][0]
        assert lines == ([f"{HEAD}its optimizer is a Wrapped"] if number == 0 else [])
        (_, theirs), their_attached, *_ = rank["theirs"]
        (_, nudged), nudged_attached, *_ = rank["nudged"]
        assert_within_drift(ours, theirs, nudged, num_steps=NUM_STEPS)
        assert_within_drift(of_attached, their_attached, nudged_attached, num_steps=NUM_STEPS)


@KINDS
def test_a_model_may_have_two_pipelines(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        ours, theirs, nudged = rank[kind][0][4], rank["theirs"][4], rank["nudged"][4]
        assert_within_drift(ours, theirs, nudged, num_steps=NUM_STEPS)


@KINDS
def test_hooks_of_backward_are_called(ranks: list[dict[str, Any]], kind: str) -> None:
    for number, rank in enumerate(ranks):
        lines, ours, count = rank[kind][0][2]
        assert lines == ([f"{HEAD}it calls hooks during backward"] if number == 0 else [])
        assert count == rank["theirs"][2][2] == NUM_STEPS - 3
        theirs, nudged = rank["theirs"][2][1], rank["nudged"][2][1]
        assert_within_drift(ours, theirs, nudged, num_steps=NUM_STEPS)


@pytest.mark.parametrize("place", PLACES)
def test_torchs_hooks_are_called_where_steps_would_not(
    ranks: list[dict[str, Any]], place: str
) -> None:
    for number, rank in enumerate(ranks):
        lines, count = rank["places"][place]
        assert lines == ([f"{HEAD}{PLACES[place]}"] if number == 0 else [])
        assert count == 3


@KINDS
def test_stages_may_be_called(ranks: list[dict[str, Any]], kind: str) -> None:
    for number, rank in enumerate(ranks):
        lines, ours = rank[kind][0][3]
        assert lines == ([f"{HEAD}a script calls its stages"] if number == 0 else [])
        theirs, nudged = rank["theirs"][3][1], rank["nudged"][3][1]
        assert_within_drift(ours, theirs, nudged, num_steps=NUM_STEPS)


@KINDS
def test_batches_keep_their_order(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        orders = rank[kind][1]
        assert orders["replaced"] == list(range(8))
        (num_read,) = orders["read"]
        assert 3 < num_read < 8
        assert orders["wrapped"] == [*range(num_read), 0, 1]
        dropped, after = orders["reset"][:3], orders["reset"][3:]
        assert dropped == [0, 1, 2]
        assert 4 < after[0] < 11 and after == list(range(after[0], 12))
