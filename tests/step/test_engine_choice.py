"""Batches are shown to the engine that trains them, once it is there."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.tiny_model import fixed_batches, make_batch, make_optimizers
from tests.support.tiny_training import LOSS, assert_same_state, by_hand, make_model
from torchembed.data import Batch
from torchembed.step.engines.jagged_engine import JaggedEngine
from torchembed.step.engines.static_engine import StaticEngine
from torchembed.step.stages import ReadBatch
from torchembed.training import TrainPipeline

CPU = torch.device("cpu")


def steps_on(batches: list[Batch]) -> tuple[TrainPipeline, Iterator[Batch]]:
    model = make_model(CPU)
    return TrainPipeline(model, LOSS, make_optimizers(model), capture=True), iter(batches)


def test_the_first_jagged_step_has_further_batches_prefetched_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(JaggedEngine, "can_be_padded", False)
    prefetch, shown = JaggedEngine.prefetch, list[int]()

    def noted(engine: JaggedEngine, batch: ReadBatch) -> None:
        if engine.has_observed:
            shown.append(batch.number)
        prefetch(engine, batch)

    monkeypatch.setattr(JaggedEngine, "prefetch", noted)
    pipeline, iterator = steps_on([make_batch(4, seed) for seed in range(4)])
    with pipeline:
        pipeline.progress(iterator)
        assert shown == [1, 2]


@pytest.mark.parametrize("is_static", [True, False])
def test_batches_read_before_a_pipeline_was_closed_are_trained_after_it(is_static: bool) -> None:
    batches = fixed_batches(8) if is_static else [make_batch(4, seed) for seed in range(8)]
    expected_losses, expected = by_hand(batches, CPU)
    pipeline, iterator = steps_on(batches)
    losses = []
    for number in range(8):
        losses.append(pipeline.progress(iterator).loss.item())
        if number in (1, 4):
            assert pipeline.num_read_ahead == 2
            pipeline.close()
    pipeline.close()
    assert losses == expected_losses
    assert_same_state(pipeline.model, expected)


def test_there_is_no_engine_of_jagged_batches_before_the_first_one() -> None:
    pipeline, iterator = steps_on([*fixed_batches(3), make_batch(4, seed=1)])
    with pipeline:
        pipeline.progress(iterator)
        assert list(map(type, pipeline.engines)) == [StaticEngine]
        for _ in range(3):
            pipeline.progress(iterator)
        assert len(pipeline.engines) == 2
