"""Each step says how it ran, captured or eager and why; changes are logged, captures counted."""

import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.tape import taped_captures
from tests.support.tiny_model import (
    TinyModel,
    fixed_batch,
    fixed_batches,
    linear_loss,
    make_batch,
    make_optimizers,
)
from tests.support.tiny_training import LOSS, assert_same_state, by_hand, make_model
from torchembed.step.batches.layout_reasons import part_layouts, reason_of_layout
from torchembed.training import Reason, StepForm, StepKind, TrainPipeline

CPU = torch.device("cpu")
WARMS_UP = StepKind(StepForm.EAGER, Reason("the first steps before a capture warm up"))
GRAPH = StepKind(StepForm.GRAPH)


def kinds_of(pipeline: TrainPipeline, batches: list[Any]) -> list[StepKind]:
    iterator = iter(batches)
    return [pipeline.progress(iterator).kind for _ in batches]


def test_steps_say_how_they_ran(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(CPU)
    batches = [*fixed_batches(6), fixed_batch(3, seed=9), *fixed_batches(2), make_batch(5, seed=1)]
    with (
        caplog.at_level(logging.INFO, "torchembed.step"),
        TrainPipeline(model, LOSS, make_optimizers(model), capture=True) as pipeline,
    ):
        found = kinds_of(pipeline, batches)
    what = "has another shape or dtype than in captured steps"
    smaller = StepKind(StepForm.EAGER, Reason(what, "batch.dense"))
    jagged = StepKind(
        StepForm.JAGGED, Reason("the first jagged step shows which ids the model looks up")
    )
    assert found == [*[WARMS_UP] * 4, GRAPH, GRAPH, smaller, GRAPH, GRAPH, jagged]
    assert found[4].form == "graph"
    assert pipeline.kinds == {WARMS_UP: 4, GRAPH: 4, smaller: 1, jagged: 1}
    assert pipeline.num_captures == 2
    assert [record.getMessage() for record in caplog.records] == [
        "from step 1 on: eager (the first steps before a capture warm up)",
        "from step 5 on: graph, no longer eager",
        f"from step 7 on: eager (batch.dense: {what}), no longer graph",
        "from step 8 on: graph, no longer eager",
        f"from step 10 on: {jagged}, no longer graph",
    ]


def test_padded_steps_say_so() -> None:
    model = make_model(CPU)
    with TrainPipeline(model, LOSS, make_optimizers(model), capture=True) as pipeline:
        forms = [kind.form for kind in kinds_of(pipeline, [make_batch(4, n) for n in range(8)])]
    assert forms[0] == "jagged"
    assert forms[1] == "eager"
    assert forms[-1] == "padded"


@pytest.mark.parametrize(
    ("capture", "why"), [(None, "a CPU has no graphs; capture=True"), (False, "capture=False")]
)
def test_eager_steps_that_were_asked_for_say_so(capture: bool | None, why: str) -> None:
    model = make_model(CPU)
    pipeline = TrainPipeline(model, LOSS, make_optimizers(model), device=CPU, capture=capture)
    (kind,) = kinds_of(pipeline, fixed_batches(1))
    assert str(kind).startswith(f"eager ({why}")


def test_a_failed_capture_is_the_reason_of_all_steps_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no graph of this")

    monkeypatch.setattr("torchembed.step.engines.static_step.CapturedCall", fails)
    model = make_model(CPU)
    with (
        pytest.warns(UserWarning, match="no graph of this"),
        TrainPipeline(model, LOSS, make_optimizers(model), capture=True) as pipeline,
    ):
        kinds = kinds_of(pipeline, fixed_batches(6))
    assert kinds[:3] == [WARMS_UP] * 3
    for kind in kinds[3:]:
        assert str(kind).startswith("eager (the capture failed: ValueError: no graph of this")
    assert pipeline.num_captures == 0


def test_a_failed_capture_names_the_line_of_the_models_code() -> None:
    class Reads(TinyModel):
        def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
            logits = super().forward(dense, sparse)
            return logits if math.isfinite(logits.sum().item()) else logits * 0

    model = Reads()
    place = r"not permitted .*\(test_step_kinds.py:\d+, in test_a_failed.*Reads.forward\)"
    with (
        taped_captures(),
        pytest.warns(UserWarning, match=place),
        TrainPipeline(model, LOSS, make_optimizers(model), capture=True) as pipeline,
    ):
        kinds_of(pipeline, fixed_batches(6))


class Opaque:
    pass


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"x": torch.zeros(2), "n": 2}, r"batch\['n'\]: has another value than in captured steps,"),
        ({"x": torch.zeros(3), "n": 1}, r"batch\['x'\]: has another shape or dtype than"),
        ({"x": torch.zeros(2)}, "the batch has other parts than those of captured steps"),
        ({"x": (torch.zeros(2), Opaque())}, r"batch\['x'\]\[1\]: is a Opaque; captured steps take"),
    ],
)
def test_a_reason_names_the_part_of_the_batch(batch: Any, reason: str) -> None:
    known = part_layouts({"x": torch.zeros(2), "n": 1})
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(str(reason_of_layout(batch, known)))


def test_a_model_that_looks_up_single_ids_is_not_padded() -> None:
    class CountsIds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(CPU)

        def forward(self, dense: Tensor, sparse: Any) -> Tensor:
            assert sparse.values.is_cpu  # padded steps give the model no ids
            copied = type(sparse)(
                keys=sparse.keys,
                values=sparse.values.clone(),
                batch_size=sparse.batch_size,
                offsets=sparse.offsets,
            )
            return self.model(dense, copied)

    model = CountsIds()
    with TrainPipeline(model, linear_loss, make_optimizers(model), capture=True) as pipeline:
        kinds = kinds_of(pipeline, [make_batch(4, n) for n in range(3)])
    assert kinds[-1].form == "jagged"
    assert "no features of the batch as they came" in str(kinds[-1].why)


def sizes_trained(sizes: list[int], **settings: Any) -> tuple[list[StepKind], int]:
    """The kinds of steps on batches of ``sizes``, which equal the plain loop, and the captures."""
    batches = [fixed_batch(size, seed) for seed, size in enumerate(sizes)]
    losses, expected = by_hand(batches, CPU)
    model = make_model(CPU)
    with TrainPipeline(model, LOSS, make_optimizers(model), capture=True, **settings) as pipeline:
        iterator = iter(batches)
        results = [pipeline.progress(iterator) for _ in batches]
    assert [result.loss.item() for result in results] == losses
    assert_same_state(model, expected)
    return [result.kind for result in results], pipeline.num_captures


def test_a_first_batch_that_is_the_odd_one_is_not_captured() -> None:
    kinds, num_captures = sizes_trained([5, *[8] * 10])
    forms = [kind.form for kind in kinds]
    assert kinds[0] == WARMS_UP
    assert "shape or dtype" in str(kinds[1])
    assert kinds[2] == WARMS_UP
    assert forms[-3:] == ["graph"] * 3
    assert num_captures == 2


def test_where_places_are_taken_a_layout_that_recurs_takes_twice_as_long_each_time() -> None:
    sizes = [5, *[8] * 9, *[4] * 3, *[8] * 2, *[4] * 12]
    kinds, num_captures = sizes_trained(sizes, max_layouts=1)
    assert num_captures == 4
    taken_over = [n for n, kind in enumerate(kinds) if "for this layout next" in str(kind.why)]
    # The batches that were read when the second, and then the fourth, in a row was trained.
    assert taken_over == [2, 3, 18, 19]
    assert [kinds[n].form for n in (10, 11, 12, 13, 14)] == ["eager"] * 3 + ["graph"] * 2
    assert kinds[-1] == GRAPH


def test_the_layout_of_jagged_steps_follows_too() -> None:
    batches = [make_batch(5, 0), *[make_batch(8, n) for n in range(1, 14)]]
    losses, expected = by_hand(batches, CPU)
    model = make_model(CPU)
    with TrainPipeline(model, LOSS, make_optimizers(model), capture=True) as pipeline:
        iterator = iter(batches)
        results = [pipeline.progress(iterator) for _ in batches]
    assert [result.loss.item() for result in results] == losses
    assert_same_state(model, expected)
    assert results[-1].kind.form == "padded"


def ranks_kinds() -> list[str]:
    """The forms of steps where the first batch of rank 1 alone is the odd one."""
    torch.manual_seed(0)
    model = TinyModel()
    torchembed.shard_embeddings(model, init_device_mesh("cpu", (2,)))
    sizes = [8 if dist.get_rank() == 0 else 5, *[8] * 11]
    batches = [fixed_batch(size, seed) for seed, size in enumerate(sizes)]
    with TrainPipeline(model, linear_loss, make_optimizers(model), capture=True) as pipeline:
        return [str(kind.form) for kind in kinds_of(pipeline, batches)]


def test_ranks_change_the_layout_at_the_same_step() -> None:
    first, second = run_on_ranks(2, ranks_kinds)
    assert first == second
    assert first[-2:] == ["graph"] * 2


def test_groups_of_a_loaded_state_may_lack_hyperparameters() -> None:
    batches = fixed_batches(6)
    losses, _ = by_hand(batches, CPU)
    model = make_model(CPU)
    optimizers = make_optimizers(model)
    optimizers[0].defaults["of a later release"] = 1
    with TrainPipeline(model, LOSS, optimizers, capture=True) as pipeline:
        iterator = iter(batches)
        assert [pipeline.progress(iterator).loss.item() for _ in batches] == losses
