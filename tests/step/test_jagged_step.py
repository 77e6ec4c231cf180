"""Steps on jagged batches train as the loop by hand does, bit for bit: as they are, with sizes that
a thread finds out, and in memory that has room for more ids."""

import dataclasses
import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.step.test_jagged_steps_on_ranks import (
    NOT_THE_MAIN_ONE,
    padded_steps_of,
    threads_that_wait,
)
from tests.step.test_pipeline import assert_same_state, by_hand, losses_of, make_model, state_of
from tests.training.models import (
    KEYS,
    NUM_ROWS,
    TinyModel,
    linear_loss,
    make_batch,
    make_optimizers,
    step_by_hand,
)
from torchembed.core import ranks
from torchembed.data import Batch
from torchembed.step.batch_layout import num_ids_in
from torchembed.step.jagged_step import JaggedStep
from torchembed.step.jagged_steps import JaggedSteps
from torchembed.step.read_ahead import Upcoming
from torchembed.step.step_result import StepOutcome
from torchembed.tables import table_of
from torchembed.training import TrainPipeline

LOSS = F.binary_cross_entropy_with_logits
CPU = torch.device("cpu")


def jagged_batches(count: int, batch_size: int = 8) -> list[Batch]:
    return [make_batch(batch_size, seed) for seed in range(count)]


def jagged_step(model: nn.Module, optimizers: Sequence[Any], loss_fn: Any = LOSS) -> JaggedStep:
    pipeline = TrainPipeline(model, loss_fn, optimizers)
    return JaggedStep(model, pipeline._compute_loss, optimizers, CPU, None)


def outcomes_of(step: JaggedStep, batches: Sequence[Any]) -> Iterator[Any]:
    """Each step's, announced ahead as a pipeline does."""
    yield step.observe(batches[0])
    coming = [step.announce(batch, lambda: True) for batch in batches[1:]]
    for now, following in zip(coming, [*coming[1:], None], strict=True):
        yield step.run(now, following)


def padded_outcomes_of(
    model: nn.Module, batches: Sequence[Any], loss_fn: Any = LOSS
) -> Iterator[Any]:
    """The same of padded steps after the first."""
    optimizers = make_optimizers(model)
    pipeline = TrainPipeline(model, loss_fn, optimizers)
    first = jagged_step(model, optimizers, loss_fn)
    yield from padded_steps_of(first, pipeline, batches)


def losses(outcomes: Iterator[StepOutcome]) -> list[float]:
    return [outcome.result.loss.item() for outcome in outcomes]


@pytest.mark.parametrize("is_padded", [False, True])
def test_jagged_steps_equal_the_loop_by_hand(is_padded: bool) -> None:
    batches = jagged_batches(7)
    expected_losses, expected = by_hand(batches, CPU)
    model = make_model(CPU)
    if is_padded:
        outcomes = padded_outcomes_of(model, batches)
    else:
        outcomes = outcomes_of(jagged_step(model, make_optimizers(model)), batches)
    assert losses(outcomes) == expected_losses
    assert_same_state(model, expected)


def with_many_ids(batch: Batch, times: int) -> Batch:
    """``batch`` with bags of as many times the ids."""
    sparse = batch.sparse
    assert sparse.offsets is not None
    lengths = sparse.offsets.diff()
    values = torch.cat([bag.repeat(times) for bag in sparse.values.split(lengths.tolist())])
    lengths = lengths * times
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    wide = dataclasses.replace(sparse, values=values, offsets=offsets)
    return batch._replace(sparse=wide)


def test_batches_that_outgrow_the_room_get_more() -> None:
    batches = jagged_batches(12)
    for number, times in ((3, 20), (4, 30), (7, 90), (8, 1), (10, 400)):
        batches[number] = with_many_ids(batches[number], times)
    expected_losses, expected = by_hand(batches, CPU)
    model = make_model(CPU)
    found = []
    for outcome, batch in zip(padded_outcomes_of(model, batches), batches, strict=True):
        found.append(outcome.result.loss.item())
        assert torch.equal(outcome.result.batch.dense, batch.dense)
        assert torch.equal(outcome.result.batch.sparse.values, batch.sparse.values)
    assert found == expected_losses
    assert_same_state(model, expected)


def test_batches_may_have_no_ids() -> None:
    batches = [with_many_ids(batch, number % 2) for number, batch in enumerate(jagged_batches(6))]
    batches[1:2] = batches[:1]  # the one that room is made for first
    expected_losses, expected = by_hand(batches, CPU)
    model = make_model(CPU)
    assert losses(padded_outcomes_of(model, batches)) == expected_losses
    assert_same_state(model, expected)


def test_a_change_of_the_model_is_seen_from_the_first_step_on() -> None:
    model = make_model(CPU)
    optimizers = make_optimizers(model)
    pipeline = TrainPipeline(model, LOSS, optimizers)
    steps = JaggedSteps(
        model,
        pipeline._compute_loss,
        optimizers,
        pipeline._make_static,
        lambda: None,
        device=CPU,
        group=None,
    )
    now, *upcoming = (
        Upcoming(batch, number, ranks.start_minimum(0, 1, -num_ids_in(batch)))
        for number, batch in enumerate(jagged_batches(3))
    )
    for _ in ("as it is", "padded"):
        steps.run(now, upcoming)
        assert not steps.is_stale
        model.eval()
        assert steps.is_stale
        model.train()
        now, *upcoming = upcoming
    steps.release()
    assert not steps.is_stale


def keyed(batch: Batch) -> dict[str, Any]:
    """The batch as a dict that holds TorchRec's features."""
    sparse = pytest.importorskip("torchrec.sparse.jagged_tensor")
    features = sparse.KeyedJaggedTensor(
        keys=list(KEYS), values=batch.sparse.values, lengths=batch.sparse.offsets.diff()
    )
    return {"dense": batch.dense, "ids": features, "clicked": batch.labels}


class WithLoss(nn.Module):
    """Takes a dict, and wants the collection's result to be TorchRec's where its features are."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()
        self.model = make_model(device)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        vectors = self.model.tables(batch["ids"])
        module = type(batch["ids"]).__module__
        assert type(vectors).__module__ == module
        logits = self.model.dense(torch.cat([batch["dense"], vectors.values()], dim=1))[:, 0]
        return LOSS(logits, batch["clicked"]), logits


def test_keyed_jagged_tensors_are_announced_too() -> None:
    batches = jagged_batches(6)
    expected_losses, expected = by_hand(batches, CPU)
    for is_padded in (False, True):
        model, keyed_batches = WithLoss(), [keyed(batch) for batch in batches]
        if is_padded:
            outcomes = padded_outcomes_of(model, keyed_batches, None)
        else:
            outcomes = outcomes_of(jagged_step(model, make_optimizers(model), None), keyed_batches)
        assert losses(outcomes) == expected_losses
        assert_same_state(model.model, expected)


class Sequences(nn.Module):
    """Has a vector for each id, so that its dense part's shapes vary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        configs = [
            torchembed.EmbeddingConfig(
                name=key, num_embeddings=NUM_ROWS + 1, embedding_dim=4, feature_names=(key,)
            )
            for key in KEYS
        ]
        self.tables = torchembed.EmbeddingCollection(configs)
        self.dense = nn.Linear(2, 1)

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        vectors = [part.values() for part in self.tables(sparse).values()]
        return self.dense(dense) + torch.cat(vectors).sum() / 8


class ReadsIds(TinyModel):
    """Needs more of a batch's ids than their vectors."""

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        assert sparse.offsets is not None
        lengths = sparse.offsets.diff().view(len(KEYS), -1).float()
        return super().forward(dense, sparse) + lengths.sum(dim=0).unsqueeze(1) / 8


class LooksUpTwice(TinyModel):
    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        swapped = torchembed.SparseFeatures(
            keys=sparse.keys[::-1],
            values=sparse.values,
            offsets=sparse.offsets,
            batch_size=sparse.batch_size,
        )
        with torch.no_grad():
            fixed = self.tables(sparse).values().sum(dim=1, keepdim=True)
        return super().forward(dense, sparse) + super().forward(dense, swapped) * fixed


@pytest.mark.parametrize("kind", [Sequences, ReadsIds, LooksUpTwice])
def test_jagged_steps_of_a_model_equal_its_plain_ones(kind: type[nn.Module]) -> None:
    batches, models = jagged_batches(5), [kind() for _ in range(2)]
    optimizers = make_optimizers(models[0])
    expected = [step_by_hand(models[0], linear_loss, optimizers, batch).item() for batch in batches]
    step = jagged_step(models[1], make_optimizers(models[1]), linear_loss)
    outcomes = outcomes_of(step, batches)
    assert losses(outcomes) == expected
    assert_same_state(models[1], state_of(models[0]))
    assert step.can_be_padded == (kind is not Sequences)
    if kind is LooksUpTwice:
        model = kind()
        assert losses(padded_outcomes_of(model, batches, linear_loss)) == expected
        assert_same_state(model, state_of(models[0]))


def test_a_model_that_reads_ids_is_not_trained_in_padded_steps() -> None:
    model = ReadsIds()
    outcomes = padded_outcomes_of(model, jagged_batches(2), linear_loss)
    next(outcomes)
    before = state_of(model)
    with pytest.warns(UserWarning, match="the train step could not be captured .*\n?.*meta"):
        assert next(outcomes) is None
    assert_same_state(model, before)


def test_a_bad_id_changes_nothing() -> None:
    batches = jagged_batches(6)
    batches[3] = with_many_ids(batches[3], 20)
    batches[3].sparse.values[2] = 99
    batches[3].sparse.values[-1] = 99  # stays behind the ids of a later batch
    model = TinyModel()
    optimizers = make_optimizers(model)
    for number, batch in enumerate(batches):
        if number != 3:
            step_by_hand(model, LOSS, optimizers, batch)
    expected = state_of(model)
    for is_padded in (False, True):
        model = TinyModel()
        if is_padded:
            outcomes = padded_outcomes_of(model, batches)
            reports = [next(outcomes).report]
            reports += [outcome.report.clone() for outcome in outcomes]
        else:
            outcomes = list(outcomes_of(jagged_step(model, make_optimizers(model)), batches))
            reports = [outcome.report for outcome in outcomes]
        assert [int(report[0]) for report in reports] == [0, 0, 0, 1, 0, 0]
        assert reports[3][1:].tolist() == [2, 99, 0, 0]
        assert_same_state(model, expected)


def test_what_cannot_be_announced_raises_in_its_own_step() -> None:
    batches = jagged_batches(4)
    offsets = batches[2].sparse.offsets
    assert offsets is not None
    offsets[1] = 1000
    model = make_model(CPU)
    step = jagged_step(model, make_optimizers(model))
    outcomes = outcomes_of(step, batches)
    assert len([next(outcomes) for _ in range(2)]) == 2
    with pytest.raises(ValueError, match="offsets must not decrease, got 1000 and"):
        next(outcomes)


def test_a_released_step_goes_and_so_does_its_thread() -> None:
    model, others = make_model(CPU), set(threading.enumerate())
    step = jagged_step(model, make_optimizers(model))
    assert len(list(outcomes_of(step, jagged_batches(3)))) == 3
    reference, (thread,) = weakref.ref(step), set(threading.enumerate()) - others
    step.release()
    assert not thread.is_alive()
    gc.disable()
    try:
        del step
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.gpu
class TestOnGpu:
    """Where padded steps are CUDA graphs."""

    @staticmethod
    def optimizers(model: nn.Module, captures_dense: bool) -> list[torch.optim.Optimizer]:
        tables = [p for p in model.parameters() if table_of(p) is not None]
        dense = [p for p in model.parameters() if table_of(p) is None]
        of_tables = torchembed.optim.Adagrad(tables, lr=0.125)
        if not captures_dense:
            return [of_tables, torch.optim.Adam(dense, lr=0.125)]
        rate = torch.tensor(0.125, device=dense[0].device)
        return [of_tables, torch.optim.Adam(dense, lr=rate, capturable=True)]

    @pytest.mark.parametrize("captures_dense", [True, False])
    @pytest.mark.parametrize("is_keyed", [False, True])
    def test_graphs_equal_eager_steps(
        self, device: torch.device, captures_dense: bool, is_keyed: bool
    ) -> None:
        batches: list[Any] = [*jagged_batches(9), make_batch(5, 100), *jagged_batches(4)]
        if is_keyed:
            batches = [keyed(batch) for batch in batches]
        found = []
        for capture in (False, True):
            model = WithLoss(device) if is_keyed else make_model(device)
            optimizers = self.optimizers(model, captures_dense)
            loss_fn = None if is_keyed else LOSS
            with TrainPipeline(model, loss_fn, optimizers, capture=capture) as pipeline:
                outputs = []
                for loss in losses_of(pipeline, batches):
                    outputs.append(loss)
                    if len(outputs) == 7 and not is_keyed:  # an evaluation of another size
                        held_out = make_batch(13, 200).to(device)
                        model.eval()
                        with torch.no_grad():
                            outputs.append(model(held_out.dense, held_out.sparse))
                        model.train()
                assert pipeline._jagged.is_captured == capture
            found.append(([output.tolist() for output in outputs], state_of(model)))
        (outputs, expected), (captured_outputs, captured) = found
        assert captured_outputs == outputs
        for name, tensor in captured.items():
            assert torch.equal(tensor, expected[name]), name

    def test_batches_may_be_on_the_gpu(self, device: torch.device) -> None:
        found = []
        for capture in (False, True):
            model = make_model(device)
            optimizers = self.optimizers(model, True)
            batches = (batch.to(device) for batch in jagged_batches(9))
            with TrainPipeline(model, LOSS, optimizers, capture=capture) as pipeline:
                outputs = list(losses_of(pipeline, batches))
            found.append(([output.item() for output in outputs], state_of(model)))
        assert found[0][0] == found[1][0]
        assert_same_state(model, found[0][1])

    @pytest.mark.parametrize("kind", [TinyModel, Sequences])
    def test_nothing_makes_the_host_wait(self, device: torch.device, kind: type[nn.Module]) -> None:
        model = kind().to(device)
        pipeline = TrainPipeline(model, linear_loss, self.optimizers(model, True))
        batches = iter([batch.pin_memory() for batch in jagged_batches(24)])
        with pipeline:
            for _ in range(8):
                pipeline.progress(batches)
            torch.cuda.set_sync_debug_mode("error")
            try:
                with threads_that_wait() as threads:
                    for _ in range(8):
                        pipeline.progress(batches)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert threads == NOT_THE_MAIN_ONE
            assert pipeline._jagged.is_captured == (kind is TinyModel)

    def test_batches_that_outgrow_the_room_get_more(self, device: torch.device) -> None:
        batches, found = jagged_batches(24), []
        for number, times in ((9, 20), (10, 30), (12, 1), (18, 90)):
            batches[number] = with_many_ids(batches[number], times)
        for capture in (False, True):
            model = make_model(device)
            optimizers = self.optimizers(model, True)
            with TrainPipeline(model, LOSS, optimizers, capture=capture) as pipeline:
                outputs = list(losses_of(pipeline, batches))
                assert pipeline._jagged.is_captured == capture
            found.append(([output.tolist() for output in outputs], state_of(model)))
        assert found[0][0] == found[1][0]
        assert_same_state(model, found[0][1])

    def test_a_bad_id_is_named_steps_later(self, device: torch.device) -> None:
        batches = jagged_batches(16)
        batches[11].sparse.values[-1] = 99
        last = KEYS[-1]
        offsets = batches[11].sparse.offsets
        assert offsets is not None
        position = int(offsets[-1] - offsets[-1 - 8]) - 1
        model = make_model(device)
        with TrainPipeline(model, LOSS, self.optimizers(model, True)) as pipeline:
            text = f"feature {last}, position {position} of the feature's ids, value 99"
            with pytest.raises(IndexError, match=text):
                list(losses_of(pipeline, batches))

    def test_a_model_that_reads_ids_runs_eagerly_and_says_why(self, device: torch.device) -> None:
        batches = jagged_batches(8)
        plain = ReadsIds().to(device)
        optimizers = make_optimizers(plain)
        expected = [
            step_by_hand(plain, LOSS, optimizers, batch.to(device)).item() for batch in batches
        ]
        model = ReadsIds().to(device)
        with TrainPipeline(model, LOSS, make_optimizers(model)) as pipeline:
            with pytest.warns(UserWarning, match="the train step could not be captured"):
                found = list(losses_of(pipeline, batches))
            assert not pipeline._jagged.is_captured
        assert [loss.item() for loss in found] == expected
        assert_same_state(model, state_of(plain))
