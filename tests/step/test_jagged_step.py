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
from tests.support.driving import trained_jagged
from tests.support.size_waits import NOT_THE_MAIN_ONE, threads_that_wait
from tests.support.tiny_model import (
    KEYS,
    NUM_ROWS,
    TinyModel,
    linear_loss,
    make_batch,
    make_optimizers,
    step_by_hand,
)
from tests.support.tiny_training import (
    assert_same_state,
    by_hand,
    losses_of,
    make_model,
    results_of,
    state_of,
)
from torchembed.data import Batch
from torchembed.step.engines.jagged_engine import JaggedEngine
from torchembed.step.engines.padded_engine import PaddedEngine
from torchembed.tables import table_of
from torchembed.training import TrainPipeline

LOSS = F.binary_cross_entropy_with_logits
CPU = torch.device("cpu")


def jagged_batches(count: int, batch_size: int = 8) -> list[Batch]:
    return [make_batch(batch_size, seed) for seed in range(count)]


def losses_by(
    kind: str, model: nn.Module, batches: Sequence[Any], loss_fn: Any = LOSS
) -> list[float]:
    """The losses of ``"jagged"`` steps, or of the ``"padded"`` ones that a GPU would capture."""
    optimizers = make_optimizers(model)
    if kind == "jagged":
        trained = trained_jagged(model, loss_fn, optimizers, batches)
        return [batch.result.loss.item() for batch in trained]
    with TrainPipeline(model, loss_fn, optimizers, device=CPU, capture=True) as pipeline:
        found = results_of(pipeline, batches)
        assert isinstance(pipeline.engine, PaddedEngine)
    return found


KINDS = ("jagged", "padded")


@pytest.mark.parametrize("kind", KINDS)
def test_jagged_steps_equal_the_loop_by_hand(kind: str) -> None:
    batches = jagged_batches(9)
    expected_losses, expected = by_hand(batches, CPU)
    model = make_model(CPU)
    assert losses_by(kind, model, batches) == expected_losses
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


def test_batches_that_outgrow_the_capacity_get_more() -> None:
    batches = jagged_batches(12)
    for number, times in ((3, 20), (4, 30), (7, 90), (8, 1), (10, 400)):
        batches[number] = with_many_ids(batches[number], times)
    expected_losses, expected = by_hand(batches, CPU)
    model = make_model(CPU)
    found, iterator = [], iter(batches)
    with TrainPipeline(model, LOSS, make_optimizers(model), capture=True) as pipeline:
        for batch in batches:
            result = pipeline.progress(iterator)
            found.append(result.loss.item())
            assert torch.equal(result.batch.dense, batch.dense)
            assert torch.equal(result.batch.sparse.values, batch.sparse.values)
    assert found == expected_losses
    assert_same_state(model, expected)


def test_batches_may_have_no_ids() -> None:
    batches = [with_many_ids(batch, number % 2) for number, batch in enumerate(jagged_batches(6))]
    batches[1:2] = batches[:1]  # the one that the capacity is made for first
    expected_losses, expected = by_hand(batches, CPU)
    model = make_model(CPU)
    assert losses_by("padded", model, batches) == expected_losses
    assert_same_state(model, expected)


def test_a_change_of_the_model_is_seen_from_the_first_step_on() -> None:
    model = make_model(CPU)
    batches = iter(jagged_batches(3))
    with TrainPipeline(model, LOSS, make_optimizers(model), capture=True) as pipeline:
        for kind in (JaggedEngine, PaddedEngine):
            pipeline.progress(batches)
            engine = pipeline.engine
            assert isinstance(engine, kind)
            assert not engine.is_stale
            model.eval()
            assert engine.is_stale
            model.train()
    assert not engine.is_stale


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


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_of_keyed_jagged_tensors_are_exchanged_ahead_too(kind: str) -> None:
    batches = jagged_batches(6)
    expected_losses, expected = by_hand(batches, CPU)
    model, keyed_batches = WithLoss(), [keyed(batch) for batch in batches]
    assert losses_by(kind, model, keyed_batches, None) == expected_losses
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
        return super().forward(dense, sparse) + (sparse.values % 2).sum() / 8


class ReadsLengths(TinyModel):
    """Needs the number of ids of each bag."""

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        lengths = sparse.lengths().float().sum(dim=0).unsqueeze(1)
        return super().forward(dense, sparse) + lengths / 8


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


@pytest.mark.parametrize("kind", [Sequences, ReadsIds, ReadsLengths, LooksUpTwice])
def test_jagged_steps_of_a_model_equal_its_plain_ones(kind: type[nn.Module]) -> None:
    batches, models = jagged_batches(5), [kind() for _ in range(2)]
    optimizers = make_optimizers(models[0])
    expected = [step_by_hand(models[0], linear_loss, optimizers, batch).item() for batch in batches]
    assert losses_by("jagged", models[1], batches, linear_loss) == expected
    assert_same_state(models[1], state_of(models[0]))
    if kind in (ReadsLengths, LooksUpTwice):
        model = kind()
        assert losses_by("padded", model, batches, linear_loss) == expected
        assert_same_state(model, state_of(models[0]))


def test_a_model_with_a_vector_for_each_id_is_trained_in_padded_steps() -> None:
    batches = jagged_batches(5)
    plain, model = Sequences(), Sequences()
    optimizers = make_optimizers(plain)
    expected = [step_by_hand(plain, linear_loss, optimizers, batch).item() for batch in batches]
    with TrainPipeline(model, linear_loss, make_optimizers(model), capture=True) as pipeline:
        assert results_of(pipeline, batches) == expected
        assert isinstance(pipeline.engine, PaddedEngine)
    assert_same_state(model, state_of(plain))


def test_a_model_that_reads_ids_is_not_trained_in_padded_steps() -> None:
    batches, plain, model = jagged_batches(4), ReadsIds(), ReadsIds()
    optimizers = make_optimizers(plain)
    expected = [step_by_hand(plain, linear_loss, optimizers, batch).item() for batch in batches]
    with TrainPipeline(model, linear_loss, make_optimizers(model), capture=True) as pipeline:
        with pytest.warns(UserWarning, match="the train step could not be captured .*\n?.*meta"):
            assert results_of(pipeline, batches) == expected
        assert isinstance(pipeline.engine, JaggedEngine)
    assert_same_state(model, state_of(plain))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_id_changes_nothing(kind: str) -> None:
    batches = jagged_batches(6)
    batches[3] = with_many_ids(batches[3], 20)
    batches[3].sparse.values[2] = 99
    batches[3].sparse.values[-1] = 99  # stays behind the ids of a later batch
    model = TinyModel()
    optimizers = make_optimizers(model)
    for number, batch in enumerate(batches):
        if number != 3:
            step_by_hand(model, LOSS, optimizers, batch)
    expected, model = state_of(model), TinyModel()
    if kind == "jagged":
        trained = list(trained_jagged(model, LOSS, make_optimizers(model), batches))
        reports = [batch.report.tolist() for batch in trained if batch.report is not None]
        assert [report[0] for report in reports] == [0, 0, 0, 1, 0, 0]
        assert reports[3][1:] == [2, 99, 0, 0]
    else:
        iterator = iter(batches)
        with TrainPipeline(model, LOSS, make_optimizers(model), capture=True) as pipeline:
            for number in range(len(batches)):
                if number == 3:
                    with pytest.raises(IndexError, match=r"position 2 of .* value 99"):
                        pipeline.progress(iterator)
                else:
                    pipeline.progress(iterator)
    assert_same_state(model, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_looked_up_raises_in_its_own_step(kind: str) -> None:
    batches = jagged_batches(4)
    offsets = batches[2].sparse.offsets
    assert offsets is not None
    offsets[1] = 1000
    model = make_model(CPU)
    if kind == "jagged":
        trained: Iterator[Any] = trained_jagged(model, LOSS, make_optimizers(model), batches)
    else:
        pipeline = TrainPipeline(model, LOSS, make_optimizers(model), capture=True)
        trained = losses_of(pipeline, batches)
    assert len([next(trained) for _ in range(2)]) == 2
    with pytest.raises(ValueError, match="offsets must not decrease, got 1000 and"):
        next(trained)


def test_a_closed_pipeline_goes_and_so_does_its_thread() -> None:
    model, others = make_model(CPU), set(threading.enumerate())
    pipeline = TrainPipeline(model, LOSS, make_optimizers(model), capture=True)
    assert len(results_of(pipeline, jagged_batches(3))) == 3
    reference, (thread,) = weakref.ref(pipeline.engine), set(threading.enumerate()) - others
    pipeline.close()
    assert not thread.is_alive()
    gc.disable()
    try:
        del pipeline
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.gpu
class TestOnGpu:
    """A GPU, where padded steps are CUDA graphs."""

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
                assert pipeline.engine.is_captured == capture
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
            assert pipeline.engine.is_captured

    def test_batches_that_outgrow_the_capacity_get_more(self, device: torch.device) -> None:
        batches, found = jagged_batches(24), []
        for number, times in ((9, 20), (10, 30), (12, 1), (18, 90)):
            batches[number] = with_many_ids(batches[number], times)
        for capture in (False, True):
            model = make_model(device)
            optimizers = self.optimizers(model, True)
            with TrainPipeline(model, LOSS, optimizers, capture=capture) as pipeline:
                outputs = list(losses_of(pipeline, batches))
                assert pipeline.engine.is_captured == capture
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
            assert not pipeline.engine.is_captured
        assert [loss.item() for loss in found] == expected
        assert_same_state(model, state_of(plain))
