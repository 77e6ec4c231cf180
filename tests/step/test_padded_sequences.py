"""Models with a vector for each id of jagged batches train in padded steps as by hand, bit for bit,
or not in such steps, and are told why."""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.jagged_sequences import (
    DIM,
    NUM_SAMPLES,
    Attention,
    CumulativeSums,
    LongAttention,
    Model,
    SegmentMeans,
    by_hand,
    by_pipeline,
    make_batch,
    optimizers_of,
)
from tests.support.tape import taped_captures
from tests.support.tiny_training import assert_same_state, state_of
from torchembed.core.lookup_results import JaggedTensor
from torchembed.step.engines.padded_engine import PaddedEngine
from torchembed.training import TrainPipeline


@pytest.fixture(autouse=True)
def _taped() -> Iterator[None]:
    with taped_captures():
        yield


RIGHT = [SegmentMeans, CumulativeSums, Attention]


@pytest.mark.parametrize("kind", ["Adagrad", "Adam", "torch"])
@pytest.mark.parametrize("model_class", RIGHT)
def test_padded_steps_equal_the_loop_by_hand(model_class: type[Model], kind: str) -> None:
    batches = [make_batch(seed) for seed in range(9)]
    plain, model = model_class(), model_class()
    expected = by_hand(plain, batches, kind)
    losses, kinds = by_pipeline(model, batches, kind)
    assert losses == expected
    assert kinds[-3:] == ["padded"] * 3
    assert_same_state(model, state_of(plain))


class ReadsLengths(SegmentMeans):
    """Weights samples by the numbers of their ids, which the batch has."""

    def forward(self, batch: dict[str, Any]) -> Tensor:
        lengths = batch["jagged"].lengths().sum(0).float()
        return super().forward(batch) * (1 + lengths.mean() / 8)


def test_lengths_of_a_batch_may_be_read() -> None:
    batches = [make_batch(seed) for seed in range(8)]
    plain, model = ReadsLengths(), ReadsLengths()
    expected = by_hand(plain, batches)
    losses, kinds = by_pipeline(model, batches)
    assert losses == expected
    assert kinds[-1] == "padded"
    assert_same_state(model, state_of(plain))


def test_batches_that_outgrow_the_places_of_a_feature_get_more() -> None:
    times = [1, 1, 1, 1, 1, 1, 40, 1, 0, 1, 1, 1, 90, 1, 1, 1, 1, 1, 1]
    batches = [make_batch(seed, factor) for seed, factor in enumerate(times)]
    plain, model = LongAttention(), LongAttention()
    expected = by_hand(plain, batches)
    losses, kinds = by_pipeline(model, batches)
    assert losses == expected
    assert kinds[5] == kinds[-1] == "padded"
    assert_same_state(model, state_of(plain))


def test_the_first_batch_may_have_no_ids() -> None:
    batches = [make_batch(seed, int(seed > 1)) for seed in range(10)]
    plain, model = SegmentMeans(), SegmentMeans()
    expected = by_hand(plain, batches)
    losses, kinds = by_pipeline(model, batches)
    assert losses == expected
    assert kinds[-1] == "padded"
    assert_same_state(model, state_of(plain))


def test_a_bad_id_changes_nothing_and_is_named() -> None:
    batches, bad = [make_batch(seed) for seed in range(9)], make_batch(50)
    bad["jagged"].values[-1] = 99
    position = int(bad["jagged"].offsets[-1] - bad["jagged"].offsets[NUM_SAMPLES]) - 1
    plain, model = SegmentMeans(), SegmentMeans()
    by_hand(plain, batches)
    batches.insert(6, bad)
    iterator, errors = iter(batches), []
    with TrainPipeline(model, None, optimizers_of(model), capture=True) as pipeline:
        for _ in batches:
            try:
                pipeline.progress(iterator)
            except IndexError as error:
                errors.append(str(error))
        assert isinstance(pipeline.engine, PaddedEngine)
        assert pipeline.engine.is_captured
    (error,) = errors
    assert f"feature tags, position {position} of the feature's ids, value 99" in error
    assert_same_state(model, state_of(plain))


@pytest.mark.parametrize("on_bad_id", ["clamp", "zero"])
def test_bad_ids_that_are_no_error_train_as_by_hand(on_bad_id: str) -> None:
    batches = [make_batch(seed) for seed in range(8)]
    for batch in batches:
        batch["jagged"].values[::3] = 99
    plain, model = SegmentMeans(on_bad_id), SegmentMeans(on_bad_id)
    expected = by_hand(plain, batches)
    losses, kinds = by_pipeline(model, batches)
    assert losses == expected
    assert kinds[-1] == "padded"
    assert_same_state(model, state_of(plain))


class MeanOfAll(Model):
    def sample(self, vectors: JaggedTensor) -> Tensor:
        return vectors.values().mean(0).expand(NUM_SAMPLES, DIM)


class BiasOfAll(Model):
    """Adds zeros, so that only a gradient shows how many."""

    def sample(self, vectors: JaggedTensor) -> Tensor:
        zeros = self.before.bias - self.before.bias.detach()
        return (vectors.values() + zeros).sum(0).expand(NUM_SAMPLES, DIM)


class Normalized(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def sample(self, vectors: JaggedTensor) -> Tensor:
        values = self.norm(vectors.values())
        return torch.segment_reduce(values, "sum", offsets=vectors.offsets(), initial=0)


class Dropout(Model):
    def sample(self, vectors: JaggedTensor) -> Tensor:
        values = F.dropout(vectors.values(), 0.5)
        return torch.segment_reduce(values, "sum", offsets=vectors.offsets(), initial=0)


class NumberedSamples(Model):
    def sample(self, vectors: JaggedTensor) -> Tensor:
        places = torch.arange(len(vectors.values()))
        samples = torch.searchsorted(vectors.offsets(), places, right=True) - 1
        return torch.zeros(NUM_SAMPLES, DIM).index_add(0, samples, vectors.values())


class RepeatedSamples(Model):
    def sample(self, vectors: JaggedTensor) -> Tensor:
        samples = torch.repeat_interleave(
            torch.arange(NUM_SAMPLES), vectors.lengths(), output_size=len(vectors.values())
        )
        return torch.zeros(NUM_SAMPLES, DIM).index_add(0, samples, vectors.values())


class LeavesMemory(Model):
    """Writes what is in bags only, and adds up all."""

    def sample(self, vectors: JaggedTensor) -> Tensor:
        values = vectors.values()
        in_bags = torch.arange(len(values)) < vectors.offsets()[-1]
        copied = torch.empty_like(values)
        copied = torch.where(in_bags.unsqueeze(1), values, copied)
        return copied.sum(0).expand(NUM_SAMPLES, DIM)


WRONG: dict[type[Model], str] = {
    MeanOfAll: "with spare places",
    BiasOfAll: "the gradient of before.bias has the norm",
    Normalized: "the output of after .Linear. has the norm",
    Dropout: "draws random numbers for spare places too",
    NumberedSamples: "aten::index_add: index 8 is out of bounds for size 8",
    RepeatedSamples: "aten::repeat_interleave: lengths add up to",
    LeavesMemory: "nan with spare places",
}


@pytest.mark.parametrize("model_class", WRONG)
def test_a_model_that_sees_spare_places_is_not_padded_and_told_why(
    model_class: type[Model],
) -> None:
    batches = [make_batch(seed) for seed in range(7)]
    plain, model = model_class(), model_class()
    torch.manual_seed(1)
    expected = by_hand(plain, batches)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=WRONG[model_class]) as caught:
        losses, kinds = by_pipeline(model, batches)
    (warning,) = caught
    assert str(warning.message).endswith("values have spare places behind offsets[-1]")
    assert losses == expected
    assert kinds[-1].startswith("jagged (")
    assert_same_state(model, state_of(plain))


class Counts(SegmentMeans):
    """Keeps a running mean, and counts its calls."""

    running: Tensor
    num_calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(DIM))

    def sample(self, vectors: JaggedTensor) -> Tensor:
        found = super().sample(vectors)
        self.running.mul_(0.5).add_(found.detach().mean(0))
        self.num_calls += 1
        return found + F.dropout(self.running)


def test_the_comparison_leaves_no_trace() -> None:
    batches = [make_batch(seed) for seed in range(3)]
    plain, model = Counts(), Counts()
    torch.manual_seed(1)
    expected = by_hand(plain, batches)
    torch.manual_seed(1)
    losses, kinds = by_pipeline(model, batches)
    assert losses == expected
    assert "warm up" in kinds[-1]
    assert model.num_calls == plain.num_calls
    assert_same_state(model, state_of(plain))


def test_settings_of_determinism_are_as_before() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_pipeline(SegmentMeans(), [make_batch(seed) for seed in range(3)])
    assert torch.are_deterministic_algorithms_enabled() == before


def test_features_in_another_batch_are_looked_up_too() -> None:
    batches = [make_batch(seed) for seed in range(4)]
    swapped = [
        {**batch, "jagged": dataclasses.replace(batch["jagged"], keys=("tags", "history"))}
        for batch in batches
    ]
    plain, model = SegmentMeans(), SegmentMeans()
    expected = by_hand(plain, batches + swapped)
    losses, _ = by_pipeline(model, batches + swapped)
    assert losses == expected
    assert_same_state(model, state_of(plain))
