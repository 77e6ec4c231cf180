"""Parameters frozen and unfrozen or given other memory, and modules set to evaluation, again and
again while a pipeline trains: as in a loop by hand, and captured or said."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import Case, held_rows, make_model, make_optimizer
from tests.support.steps_on_ranks import NO_RANK, WithLoss, static_batch
from tests.support.tape import taped_captures
from tests.support.tiny_model import (
    TinyModel,
    fixed_batches,
    make_batch,
    make_optimizers,
    step_by_hand,
)
from tests.support.tiny_training import LOSS, assert_same_state, state_of
from torchembed.training import StepForm, TrainPipeline

NUM_STEPS = 24
Change = Callable[[Any, int], object]


class Deep(TinyModel):
    def __init__(self) -> None:
        super().__init__(is_deep=True)


def freeze_in_turns(model: Any, number: int) -> None:
    model.dense[0].requires_grad_(number % 4 < 2)


def freeze_tables_in_turns(model: Any, number: int) -> None:
    model.tables.requires_grad_(number % 4 < 2)


def set_modes_in_turns(model: Any, number: int) -> None:
    model.dense[1].train(number % 4 < 2)


def move_always(model: Any, number: int) -> None:
    """As ``flatten_parameters()`` of a recurrent layer does on a GPU."""
    del number
    model.dense[0].weight.data = model.dense[0].weight.detach().clone()


def unfreeze_layer_by_layer(model: Any, number: int) -> None:
    for layer, module in enumerate(model.dense):
        module.requires_grad_(layer * 4 <= number)


def trained(change: Change, *, jagged: bool = False) -> tuple[TrainPipeline, list[str]]:
    """Train by hand and by a pipeline with ``change`` before each step, and hold that both are
    equal; the pipeline, and the texts of its warnings."""
    batches = fixed_batches(NUM_STEPS)
    if jagged:
        batches = [make_batch(4, number) for number in range(NUM_STEPS)]
    by_hand = Deep()
    optimizers, losses = make_optimizers(by_hand), []
    for number, batch in enumerate(batches):
        change(by_hand, number)
        losses.append(step_by_hand(by_hand, LOSS, optimizers, batch).item())
    model, iterator, found = Deep(), iter(batches), list[float]()
    with (
        taped_captures(),
        warnings.catch_warnings(record=True) as caught,
        TrainPipeline(model, LOSS, make_optimizers(model), capture=True) as pipeline,
    ):
        warnings.simplefilter("always")
        for number in range(NUM_STEPS):
            change(model, number)
            found.append(pipeline.progress(iterator).loss.item())
    assert found == losses
    assert_same_state(model, state_of(by_hand))
    return pipeline, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("jagged", [False, True], ids=["fixed", "jagged"])
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (freeze_in_turns, "requires_grad of dense.0.weight"),
        (freeze_tables_in_turns, "requires_grad of tables."),
        (set_modes_in_turns, "training of module dense.1"),
        (move_always, "memory of dense.0.weight"),
    ],
)
def test_modes_that_change_again_and_again_train_eagerly(
    change: Change, where: str, jagged: bool
) -> None:
    pipeline, (text,) = trained(change, jagged=jagged)
    assert where in text
    kind, num_steps = list(pipeline.kinds.items())[-1]
    assert kind.form is StepForm.EAGER
    assert text.endswith(str(kind.why))
    assert num_steps > NUM_STEPS // 2


def test_layers_that_are_unfrozen_one_after_the_other_are_captured() -> None:
    pipeline, texts = trained(unfreeze_layer_by_layer)
    assert texts == []
    assert [*pipeline.kinds][-1].form is StepForm.GRAPH


def test_a_mode_that_changes_once_in_a_while_is_captured() -> None:
    pipeline, texts = trained(lambda model, number: model.dense[0].requires_grad_(number < 12))
    assert texts == []
    assert pipeline.num_captures == 4


CASE = Case(placements=dict.fromkeys("abcd", "table_wise"), fixed=True)


def train_with_a_table_of_one_rank(*, capture: bool) -> tuple[dict[str, Any], list[str], str]:
    """On a rank of gloo: its rows, its warnings, and the kind of its last step, where the only rank
    that holds table "a" freezes it again and again."""
    rank = dist.get_rank()
    model = make_model(CASE, "meta")
    torchembed.shard_embeddings(model, CASE.mesh(), CASE.plan(dist.get_world_size()))
    optimizer, with_loss = make_optimizer(CASE, model), WithLoss(model)
    assert optimizer is not None
    batches = (static_batch(CASE, rank, step, NO_RANK) for step in range(NUM_STEPS))
    with (
        warnings.catch_warnings(record=True) as caught,
        TrainPipeline(with_loss, None, [optimizer], device="cpu", capture=capture) as pipeline,
    ):
        warnings.simplefilter("always")
        for step in range(NUM_STEPS):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(".a." not in name or step % 4 < 2)
            pipeline.take_up_changes()
            pipeline.progress(batches)
    texts = [str(warning.message) for warning in caught]
    return held_rows(model), texts, str([*pipeline.kinds][-1])


def in_both_ways() -> list[tuple[dict[str, Any], list[str], str]]:
    return [train_with_a_table_of_one_rank(capture=capture) for capture in (True, False)]


def test_a_table_of_one_rank_that_changes_again_and_again_concerns_all() -> None:
    found = run_on_ranks(2, in_both_ways)
    of_holder, of_other = sorted(found, key=lambda of_rank: "another rank" in of_rank[0][2])
    assert "requires_grad of tables.embedding_bags.a.weight: it changes" in of_holder[0][2]
    assert "another rank's model changes again and again" in of_other[0][2]
    for captured, eager in found:
        assert len(captured[1]) == 1
        assert captured[0].keys() == eager[0].keys()
        for name, (extent, rows, states) in captured[0].items():
            assert eager[0][name][0] == extent
            assert (eager[0][name][1] == rows).all()
            assert all((a == b).all() for a, b in zip(eager[0][name][2], states, strict=True))
