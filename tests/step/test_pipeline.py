"""The pipeline trains as the loop by hand does: eagerly, in static steps, and in CUDA graphs."""

import copy
import gc
import itertools
import math
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.row_indices import RecordingBagConfig, RecordingIndex
from tests.support.tiny_model import (
    TinyModel,
    fixed_batch,
    fixed_batches,
    linear_loss,
    make_batch,
    make_optimizers,
    step_by_hand,
)
from tests.support.tiny_training import (
    LOSS,
    assert_same_state,
    by_hand,
    losses_of,
    make_model,
    results_of,
    state_of,
)
from tests.support.tolerance import relative_error
from torchembed.data import Batch
from torchembed.modules.lookup.lookup_stages import LookedUp
from torchembed.step.engines.eager_engine import EagerEngine
from torchembed.step.engines.jagged_engine import JaggedEngine
from torchembed.step.engines.static_engine import StaticEngine
from torchembed.step.step_optimizers import StepOptimizers
from torchembed.tables import table_of
from torchembed.training import History, TrainPipeline, train

CPU = torch.device("cpu")


def captured_steps(
    model: nn.Module, optimizers: Sequence[Any], loss_fn: Any = LOSS
) -> TrainPipeline:
    """The steps that a GPU captures, which a CPU takes as they are."""
    return TrainPipeline(model, loss_fn, optimizers, device=CPU, capture=True)


def test_the_pipeline_equals_the_loop_by_hand(device: torch.device) -> None:
    batches = [*fixed_batches(6), make_batch(5, seed=1), *fixed_batches(2), fixed_batch(3, seed=9)]
    losses, expected = by_hand(batches, device)
    model = make_model(device)
    pipeline = TrainPipeline(model, LOSS, make_optimizers(model))
    assert results_of(pipeline, batches) == losses
    assert_same_state(model, expected)


def test_a_model_may_compute_its_own_loss(device: torch.device) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(device)

        def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
            logits = self.model(batch["dense"], batch["ids"])[:, 0]
            return LOSS(logits, batch["clicked"]), logits

    batches = fixed_batches(5)
    losses, expected = by_hand(batches, device)
    model = WithLoss()
    pipeline = TrainPipeline(model, None, make_optimizers(model))
    named = [{"dense": b.dense, "ids": b.sparse, "clicked": b.labels} for b in batches]
    assert list(results_of(pipeline, named)) == losses
    assert_same_state(model.model, expected)


def test_captured_steps_equal_the_loop_by_hand() -> None:
    batches = [*fixed_batches(9), make_batch(5, 1), *fixed_batches(7), fixed_batch(3, 9)]
    losses, expected = by_hand(batches, CPU)
    model = make_model(CPU)
    pipeline = captured_steps(model, make_optimizers(model))
    iterator, found, engines = iter(batches), [], []
    for _ in batches:
        found.append(pipeline.progress(iterator).loss.item())
        engines.append((type(pipeline.engine), pipeline.engine.is_captured))
    assert found == losses
    assert_same_state(model, expected)
    warm, captured = (StaticEngine, False), (StaticEngine, True)
    others = [(JaggedEngine, False), (EagerEngine, False)]
    assert engines == [*[warm] * 4, *[captured] * 5, others[0], *[captured] * 7, others[1]]


def test_each_trained_batch_is_admitted_once_and_after_its_ids_were_checked() -> None:
    """Preparing a buffer that holds zeros, or a batch that was trained already, admits nothing.

    Epochs count the batches that are admitted to be trained, whichever engine prepares them, and
    each is released once its batch is trained.
    """
    batches = fixed_batches(6, bad=(2,))
    batches.insert(3, make_batch(5, 1))
    batches.insert(5, make_batch(5, 2))
    model = TinyModel(is_deep=True, config=RecordingBagConfig)
    assert model.tables.admission_changes_tables
    assert not TinyModel().tables.admission_changes_tables
    optimizers = make_optimizers(model)
    pipeline, iterator = captured_steps(model, optimizers), iter(batches)
    for number in range(len(batches)):
        if number == 2:
            with pytest.raises(IndexError, match="value 99"):
                pipeline.progress(iterator)
        else:
            pipeline.progress(iterator)
    (group,) = model.tables.table_set.current_groups()
    index = group.index
    assert isinstance(index, RecordingIndex)
    # The model's own forward looks up the first batch of each kind, which shows its lookup calls.
    in_forward = [a for a in index.admissions if a.epoch is None]
    assert [a.ids for a in in_forward] == [batches[n].sparse.values.tolist() for n in (0, 3)]
    ahead = [a for a in index.admissions if a.epoch is not None]
    trained = [a for a in ahead if a.is_trained]
    expected = (1, 4, 5, 6, 7)
    assert [a.ids for a in trained] == [batches[n].sparse.values.tolist() for n in expected]
    assert [a.epoch for a in trained] == [1, 2, 3, 4, 5]
    # The bad batch, and buffers without a new one, are in the epoch of the batch before.
    epoch = 0
    for admission in ahead:
        assert admission.epoch == epoch + admission.is_trained
        epoch += admission.is_trained
    assert [a.ids for a in ahead if not a.is_trained].count(batches[2].sparse.values.tolist()) == 1
    assert len(ahead) > len(trained) + 1
    # Of the bad batch, after its step, that of the one before.
    assert index.released == [1, 1, 2, 3, 4, 5]


def test_an_engine_knows_when_the_model_has_changed() -> None:
    model = make_model(CPU)
    optimizers = make_optimizers(model)
    pipeline = captured_steps(model, optimizers)
    pipeline.progress(iter(fixed_batches(2)))
    engine = pipeline.engine
    assert not engine.is_stale
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    norm.eval()
    assert engine.is_stale
    norm.train()
    assert not engine.is_stale
    norm.weight.requires_grad_(False)
    assert engine.is_stale
    norm.weight.requires_grad_(True)
    assert not engine.is_stale
    tables = [parameter for parameter in model.parameters() if table_of(parameter) is not None]
    for parameter in tables:
        parameter.requires_grad_(False)
    assert engine.is_stale
    for parameter in tables:
        parameter.requires_grad_(True)
    assert not engine.is_stale
    (group,) = optimizers[0].param_groups
    group["lr"] = torch.tensor(0.125)
    of_step = StepOptimizers(optimizers)
    known = of_step.memory(is_cuda=False)
    group["lr"].fill_(0.5)
    assert of_step.memory(is_cuda=False) == known
    before, group["lr"] = group["lr"], torch.tensor(0.25)
    assert of_step.memory(is_cuda=False) != known
    group["lr"] = before
    assert of_step.memory(is_cuda=False) == known


class CallsTwice(TinyModel):
    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        return super().forward(dense, sparse) + super().forward(dense, sparse)


class LooksUpWithoutGradients(TinyModel):
    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        with torch.no_grad():
            vectors = self.tables(sparse).values()
        return self.dense(dense) + vectors.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("kind", [CallsTwice, LooksUpWithoutGradients])
def test_captured_steps_of_a_model_equal_its_plain_ones(kind: type[TinyModel]) -> None:
    batches, models = fixed_batches(8), [kind() for _ in range(2)]
    optimizers = make_optimizers(models[0])
    losses = [step_by_hand(models[0], linear_loss, optimizers, batch).item() for batch in batches]
    pipeline = captured_steps(models[1], make_optimizers(models[1]), linear_loss)
    assert results_of(pipeline, batches) == losses
    assert pipeline.engine.is_captured
    assert_same_state(models[1], state_of(models[0]))


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("dense", ["Adam", "Adagrad", "fused"])
def test_a_step_with_a_bad_id_changes_nothing(dense: str, capture: bool) -> None:
    bad = (2, 3, 7)
    batches = fixed_batches(9, bad=bad)

    def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
        tables, others = make_optimizers(model)
        parameters = others.param_groups[0]["params"]
        if dense == "Adagrad":
            others = torch.optim.Adagrad(parameters, lr=0.125)
        if dense == "fused":
            others = torch.optim.Adam(parameters, lr=0.125, fused=True)
        return [tables, others]

    # Without batch norm, whose buffers the bad batch does change.
    model = TinyModel()
    optimizers = optimizers_of(model)
    for number, batch in enumerate(batches):
        if number not in bad:
            step_by_hand(model, LOSS, optimizers, batch)
    expected = state_of(model)

    model, raised = TinyModel(), []
    pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=capture)
    iterator = iter(batches)
    for number in range(len(batches)):
        try:
            pipeline.progress(iterator)
        except IndexError as error:
            raised.append((number, str(error)))
    assert [number for number, _ in raised] == list(bad)
    for _, message in raised:
        assert "position 3 of the feature's ids, value 99" in message
        assert "That step changed nothing" in message
    assert_same_state(model, expected)


def test_a_pipeline_and_its_engines_go_at_once() -> None:
    """Without a garbage collection: graphs keep process groups from being destroyed."""
    model = make_model(CPU)
    pipeline = captured_steps(model, make_optimizers(model))
    assert len(results_of(pipeline, fixed_batches(7))) == 7
    remains = [weakref.ref(pipeline), weakref.ref(pipeline.engine)]
    gc.disable()
    try:
        del pipeline
        assert [reference() for reference in remains] == [None, None]
    finally:
        gc.enable()


def test_a_bad_id_raises_at_once_on_the_cpu() -> None:
    model = make_model(CPU)
    pipeline = TrainPipeline(model, LOSS, make_optimizers(model))
    batches = iter(fixed_batches(3, bad=(1,)))
    pipeline.progress(batches)
    with pytest.raises(IndexError, match=r"table f0, feature f0, position 3 .* value 99"):
        pipeline.progress(batches)
    pipeline.progress(batches)
    with pytest.raises(StopIteration):
        pipeline.progress(batches)


def test_a_collection_recognizes_the_batch_that_it_prepared(device: torch.device) -> None:
    model = make_model(device)
    one, other = (fixed_batch(4, seed).sparse.to(device) for seed in (0, 1))
    expected = model.tables(one).values()
    prepared = model.tables.prepare(one)
    rewrapped = torchembed.SparseFeatures(
        keys=one.keys, values=one.values, batch_size=4, hotness=one.hotness
    )
    swapped = torchembed.SparseFeatures(
        keys=one.keys[::-1], values=one.values, batch_size=4, hotness=(3, 2)[::-1]
    )
    wrong = LookedUp(prepared.features, model.tables.prepare(other).rows)
    assert torch.equal(model.tables(one).values(), expected)
    with model.tables.reusing([wrong]):
        # That it reused what was found ahead shows in the other batch's vectors.
        assert torch.equal(model.tables(rewrapped).values(), model.tables(other).values())
        assert not torch.equal(model.tables(swapped).values(), model.tables(other).values())
    assert torch.equal(model.tables(one).values(), expected)


def test_vectors_that_were_looked_up_ahead_are_reused_and_trained() -> None:
    batches = fixed_batches(2)
    one, other = (make_model(CPU) for _ in range(2))
    optimizers = [make_optimizers(model) for model in (one, other)]
    for batch in batches:
        losses = []
        for model, of_model in zip((one, other), optimizers, strict=True):
            looked_up = []
            if model is other:
                prepared = model.tables.prepare(batch.sparse)
                looked_up = [model.tables.look_up(prepared)]
            with model.tables.reusing(looked_up):
                losses.append(step_by_hand(model, LOSS, of_model, batch))
        assert losses[0] == losses[1]
    assert_same_state(one, state_of(other))


def test_what_was_prepared_before_a_regrouping_is_refused() -> None:
    model = make_model(CPU)
    features = fixed_batch(4, 0).sparse
    prepared = model.tables.prepare(features)
    model.tables.embedding_bags["f0"].weight.requires_grad_(False)
    model.tables.prepare(features)
    with (
        model.tables.reusing([LookedUp(prepared.features, prepared.rows)]),
        pytest.raises(RuntimeError, match="tables f0, f1 were regrouped between prepare and"),
    ):
        model.tables(features)


def then_fails(batches: Sequence[Batch]) -> Iterator[Batch]:
    yield from batches
    raise OSError("the disk is gone")


def test_an_error_in_reading_hides_no_result(device: torch.device) -> None:
    batches = fixed_batches(11)
    losses, expected = by_hand([*batches[:7], *batches[9:]], device)
    model = make_model(device)
    pipeline = TrainPipeline(model, LOSS, make_optimizers(model))
    source, found = then_fails(batches[:5]), []
    with pytest.raises(OSError, match="the disk is gone"):  # noqa: PT012 - when it is raised counts
        while True:
            found.append(pipeline.progress(source).loss.item())
    assert len(found) == 5
    # Of a source that is given up, what was read ahead is not trained later.
    source = iter(batches[5:9])
    found += [pipeline.progress(source).loss.item() for _ in range(2)]
    found += results_of(pipeline, batches[9:])
    assert found == losses
    assert_same_state(model, expected)


@pytest.mark.gpu
class TestGraphs:
    """A GPU, where the steps are CUDA graphs."""

    @staticmethod
    def optimizers(model: nn.Module, lr: float = 0.125) -> list[torch.optim.Optimizer]:
        tables = [p for p in model.parameters() if table_of(p) is not None]
        dense = [p for p in model.parameters() if table_of(p) is None]
        rate = torch.tensor(lr, device=dense[0].device)
        return [
            torchembed.optim.Adagrad(tables, lr=lr),
            torch.optim.Adam(dense, lr=rate, capturable=True),
        ]

    @pytest.mark.parametrize("captures_dense", [True, False])
    def test_graphs_equal_eager_steps(self, device: torch.device, captures_dense: bool) -> None:
        make = self.optimizers if captures_dense else make_optimizers
        batches = [*fixed_batches(9), make_batch(5, 1), *fixed_batches(7), fixed_batch(3, 9)]
        found = []
        for capture in (False, True):
            model = make_model(device)
            outputs: list[Tensor] = []
            pipeline = TrainPipeline(model, LOSS, make(model), capture=capture)
            for loss in losses_of(pipeline, batches):
                outputs.append(loss)
                if len(outputs) in (7, 14):  # an evaluation, with another batch size
                    held_out = fixed_batch(13, 100).to(device)
                    model.eval()
                    with torch.no_grad():
                        outputs.append(model(held_out.dense, held_out.sparse))
                    model.train()
            found.append(([output.tolist() for output in outputs], state_of(model)))
            pipeline.progress(iter(fixed_batches(1)))
            assert isinstance(pipeline.engine, StaticEngine) == capture
            assert pipeline.engine.is_captured == capture
        (outputs, expected), (captured_outputs, captured) = found
        assert captured_outputs == outputs
        for name, tensor in captured.items():
            assert torch.equal(tensor, expected[name]), name

    def test_nothing_makes_the_host_wait(self, device: torch.device) -> None:
        model = make_model(device)
        pipeline = TrainPipeline(model, LOSS, self.optimizers(model))
        batches = itertools.cycle([batch.pin_memory() for batch in fixed_batches(5)])
        for _ in range(8):
            pipeline.progress(batches)
        pipeline.check_ids()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                pipeline.progress(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with torch.profiler.profile(acc_events=True) as profile:
            for _ in range(8):
                pipeline.progress(batches)
        calls = {event.key: event.count for event in profile.key_averages()}
        assert calls["cudaGraphLaunch"] == 8
        waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
        # The profiler itself waits once for the device, when it ends.
        assert sum(calls.get(name, 0) for name in waits) <= 1, calls
        assert "cudaMemcpy" not in calls

    def test_losses_are_read_without_waiting(self, device: torch.device) -> None:
        model, history = make_model(device), History(read_loss_every=3)
        pipeline = TrainPipeline(model, LOSS, self.optimizers(model))
        batches = [batch.pin_memory() for batch in fixed_batches(18)]
        train(pipeline, batches[:8], history=history)
        torch.cuda.set_sync_debug_mode("error")
        try:
            train(pipeline, batches[8:], history=history)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        model = make_model(device)
        eager = TrainPipeline(model, LOSS, self.optimizers(model), capture=False)
        losses = results_of(eager, batches)
        ends = [3, 6, 8, 9, 12, 15, 18]
        assert [point.step for point in history.losses] == ends
        for first, last, point in zip([0, *ends], ends, history.losses, strict=False):
            # Up to two float32 sums, and a quotient.
            mean = sum(losses[first:last]) / (last - first)
            assert point.loss == pytest.approx(mean, rel=relative_error(3), abs=0)

    def test_learning_rates_follow_their_schedule(self, device: torch.device) -> None:
        found = []
        for capture in (False, True):
            model = make_model(device)
            optimizers = self.optimizers(model)
            schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
            pipeline = TrainPipeline(model, LOSS, optimizers, capture=capture)
            iterator = iter(fixed_batches(9))
            for _ in range(9):
                pipeline.progress(iterator)
                for scheduler in schedulers:
                    scheduler.step()
            found.append(state_of(model))
        for name, tensor in found[0].items():
            assert torch.equal(tensor, found[1][name]), name

    @pytest.mark.parametrize("captures_dense", [True, False])
    def test_a_bad_id_skips_its_step_and_raises_later(
        self, device: torch.device, captures_dense: bool
    ) -> None:
        batches = fixed_batches(12, bad=(1, 7))
        batches[9] = make_batch(5, 1)
        batches[9].sparse.values[0] = -4
        good = [batch for number, batch in enumerate(batches) if number not in (1, 7, 9)]
        make = self.optimizers

        def without_state(model: nn.Module) -> list[torch.optim.Optimizer]:
            tables, dense = self.optimizers(model)
            return [tables, torch.optim.SGD(dense.param_groups[0]["params"], lr=0.125)]

        if not captures_dense:
            make = without_state
        model = TinyModel().to(device)
        pipeline = TrainPipeline(model, LOSS, make(model), capture=False)
        assert len(results_of(pipeline, good)) == 9
        expected = state_of(model)

        model = TinyModel().to(device)
        pipeline = TrainPipeline(model, LOSS, make(model))
        iterator, messages, num_steps = iter(batches), [], 0
        while True:
            try:
                pipeline.progress(iterator)
                num_steps += 1
            except IndexError as error:
                messages.append(str(error))
            except StopIteration:
                break
        assert num_steps == 12
        values = [message.split(" value ")[1].split(";")[0] for message in messages]
        assert values == ["99", "99", "-4"]
        assert all("That step changed nothing" in message for message in messages)
        assert_same_state(model, expected)

    def test_what_cannot_be_captured_runs_eagerly_and_says_why(self, device: torch.device) -> None:
        class Waiting(TinyModel):
            def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
                assert math.isfinite(dense.sum().item())
                return super().forward(dense, sparse)

        batches = fixed_batches(8)
        losses, expected = by_hand(batches, device)
        model = Waiting(is_deep=True).to(device)
        pipeline = TrainPipeline(model, LOSS, make_optimizers(model))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert results_of(pipeline, batches) == losses
        told = [str(w.message) for w in caught if "could not be captured" in str(w.message)]
        assert len(told) == 1
        assert "captur" in told[0].split("eagerly")[1]
        assert_same_state(model, expected)

    def test_loaded_states_are_taken_up(self, device: torch.device) -> None:
        found = []
        for capture in (False, True):
            model = make_model(device)
            optimizers = self.optimizers(model)
            pipeline = TrainPipeline(model, LOSS, optimizers, capture=capture)
            iterator, saved = iter(fixed_batches(16)), []
            for step in range(16):
                if step == 4:
                    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
                if step == 8:
                    for optimizer, state in zip(optimizers, saved, strict=True):
                        optimizer.load_state_dict(state)
                pipeline.progress(iterator)
            found.append(state_of(model))
        for name, tensor in found[0].items():
            assert torch.equal(tensor, found[1][name]), name

    def test_regrouped_tables_are_captured_again(self, device: torch.device) -> None:
        found = []
        for capture in (False, True):
            model = make_model(device)
            pipeline = TrainPipeline(model, LOSS, self.optimizers(model), capture=capture)
            iterator = iter(fixed_batches(16))
            for step in range(16):
                if step == 8:
                    model.tables.embedding_bags["f0"].weight.requires_grad_(False)
                pipeline.progress(iterator)
            found.append(state_of(model))
        for name, tensor in found[0].items():
            assert torch.equal(tensor, found[1][name]), name

    def test_a_step_that_does_not_end_is_given_up(self, device: torch.device) -> None:
        model = make_model(device)
        pipeline = TrainPipeline(model, LOSS, self.optimizers(model), timeout_seconds=0.05)
        batches = iter(fixed_batches(12))
        for _ in range(6):
            pipeline.progress(batches)
        pipeline.check_ids()
        torch.cuda._sleep(2 * 10**9)  # about a second
        for _ in range(2):
            pipeline.progress(batches)
        with pytest.raises(TimeoutError, match=r"has not finished a step in 0\.05 s; where"):
            pipeline.progress(batches)
        torch.cuda.synchronize()

    def test_a_closed_pipeline_captures_anew(self, device: torch.device) -> None:
        batches, found = fixed_batches(16), []
        for num_steps in (16, 8):
            model = make_model(device)
            iterator = iter(batches)
            with TrainPipeline(model, LOSS, self.optimizers(model)) as pipeline:
                for step in range(16):
                    if step == num_steps:
                        pipeline.close()
                        assert not pipeline.engine.is_captured
                    pipeline.progress(iterator)
                assert pipeline.engine.is_captured
            assert not pipeline.engine.is_captured
            found.append(state_of(model))
        for name, tensor in found[0].items():
            assert torch.equal(tensor, found[1][name]), name

    def test_leaving_raises_for_the_last_steps(self, device: torch.device) -> None:
        model = make_model(device)
        batches = iter(fixed_batches(9, bad=(8,)))
        pipeline = TrainPipeline(model, LOSS, self.optimizers(model))
        for _ in range(9):
            pipeline.progress(batches)
        with pytest.raises(IndexError, match=r"value 99; .* That step changed nothing"):
            pipeline.close()

    def test_ten_thousand_steps_leak_nothing(self, device: torch.device) -> None:
        def on_device() -> tuple[int, ...]:
            pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
            return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pinned

        def on_host() -> tuple[int, int]:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE"), len(gc.get_objects())

        model = make_model(device)
        batches = itertools.cycle([batch.pin_memory() for batch in fixed_batches(5)])
        found = []
        with TrainPipeline(model, LOSS, self.optimizers(model)) as pipeline:
            for _ in range(6):
                for _ in range(2_000):
                    pipeline.progress(batches)
                pipeline.check_ids()
                gc.collect()
                found.append((on_device(), *on_host()))
        assert {device_bytes for device_bytes, _, _ in found} == {found[0][0]}
        # What is made once may come at any time, so a leak is what grows in each part. The least
        # that a step could leak in C++, an event or a tensor, is more than 64 bytes.
        parts = list(itertools.pairwise(found))
        assert min(after[1] - before[1] for before, after in parts) < 2_000 * 64, found
        assert min(after[2] - before[2] for before, after in parts) < 20, found


def test_waits_for_batches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def batches() -> Iterator[Batch]:
        nonlocal now
        for number, batch in enumerate(fixed_batches(4)):
            now += 0.25 if number in (1, 2) else 1e-5
            yield batch

    monkeypatch.setattr("torchembed.step.batches.read_ahead.time.perf_counter", lambda: now)
    model = make_model(CPU)
    pipeline = TrainPipeline(model, LOSS, make_optimizers(model))
    assert pipeline.input_stalls == (0, 0.0)
    iterator = batches()
    for _ in range(4):
        pipeline.progress(iterator)
    assert pipeline.input_stalls == (2, 0.5)
