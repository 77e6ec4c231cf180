"""Jagged steps, whose sizes a thread finds out ahead, train a sharded model as plain steps an
unsharded one; over gloo as they are, over NCCL without waiting for a GPU."""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchembed
from tests.support.driving import trained_jagged
from tests.support.ranks import run_on_ranks
from tests.support.row_indices import RecordingIndex
from tests.support.sharded_cases import (
    Case,
    assert_equal_rows,
    held_rows,
    make_batch,
    make_model,
    make_optimizer,
)
from tests.support.size_waits import NOT_THE_MAIN_ONE, threads_that_wait
from tests.support.steps_on_ranks import (
    BAD_STEP,
    MIXED,
    NO_RANK,
    NUM_STEPS,
    WithLoss,
    static_batch,
    train_plainly,
)
from torchembed.step.batches.bucketized_buffers import Capacity
from torchembed.step.engines.padded_engine import PaddedEngine
from torchembed.training import TrainPipeline

CASES = [
    Case(placements=dict.fromkeys("abcd", "table_wise")),
    Case(placements=MIXED, optimizer="RowwiseAdagrad"),
    Case(placements=MIXED, optimizer="Adam", weighted=True),
    Case(placements=dict.fromkeys("abcd", "row_wise"), dtype=torch.bfloat16),
    Case(placements=MIXED, fused=False, optimizer="SGD"),
    Case(placements=MIXED, pooled=False),
    Case(placements=MIXED, pooled=False, fixed=True),
]


ROW_WISE = Case(placements=dict.fromkeys("abcd", "row_wise"))
RECORDED = dataclasses.replace(ROW_WISE, is_recorded=True)
SKEWED_STEP = 5
OUTGROWN_STEP = SKEWED_STEP + 1
"""The first that steps with new room prepare."""


def skewed_batch(case: Case, rank: int, step: int, bad_rank: int) -> torchembed.SparseFeatures:
    """A batch of many ids; on one step all of them are those of one rank, and on the next one a
    rank's batch, and no other's, needs more room.

    A power of two times as many, so that means stay exact.
    """
    batch = static_batch(case, rank, step, bad_rank)
    times = 256 if step == OUTGROWN_STEP and rank == 1 else 32
    assert batch.offsets is not None
    values = batch.values.repeat_interleave(times)
    if step == SKEWED_STEP:
        values = torch.zeros_like(values)
    return dataclasses.replace(batch, values=values, offsets=batch.offsets * times)


def train_in_jagged_steps(runs: list[tuple[Case, int, bool]]) -> list[dict[str, Any]]:
    """On a rank of gloo: its rows after training, which steps were skipped, which threads have
    waited for sizes after the first steps, the capacities of padded steps, and what
    :func:`trained_epochs` says."""
    rank, results = dist.get_rank(), []
    for case, bad_rank, is_padded in runs:
        batch_of = skewed_batch if case in (ROW_WISE, RECORDED) else static_batch
        model = make_model(case, "meta")
        torchembed.shard_embeddings(model, case.mesh(), case.plan(dist.get_world_size()))
        optimizer, with_loss = make_optimizer(case, model), WithLoss(model)
        optimizers = [] if optimizer is None else [optimizer]
        batches = [batch_of(case, rank, step, bad_rank) for step in range(NUM_STEPS)]
        steps = (padded_steps if is_padded else jagged_steps)(with_loss, optimizers, batches)
        # The first one shows what is looked up; before the first padded one the model is compared
        # with itself.
        first = [next(steps) for _ in range(2 if is_padded else 1)]
        flags, capacities = map(list, zip(*first, strict=True))
        with threads_that_wait() as threads:
            for skipped, capacity in steps:
                flags.append(skipped)
                capacities.append(capacity)
        results.append(
            {
                "rows": held_rows(model),
                "skipped": flags,
                "threads": threads,
                "capacities": capacities,
                "trained_epochs": trained_epochs(model),
            }
        )
    return results


def trained_epochs(model: torch.nn.Module) -> list[list[int]]:
    """For each group of recorded tables the epochs in which batches were admitted to be trained."""
    groups = model.tables.table_set.current_groups()
    indices = [group.index for group in groups if isinstance(group.index, RecordingIndex)]
    return [
        [a.epoch for a in index.admissions if a.is_trained and a.epoch is not None]
        for index in indices
    ]


def jagged_steps(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], batches: list[Any]
) -> Iterator[tuple[int, None]]:
    """For each step, if it was skipped."""
    for trained in trained_jagged(model, None, optimizers, batches):
        assert trained.report is not None
        yield int(trained.report[0]), None


def padded_steps(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], batches: list[Any]
) -> Iterator[tuple[int, Capacity | None]]:
    """Likewise by the steps that a GPU would capture, with their capacity."""
    iterator = iter(batches)
    with TrainPipeline(model, None, optimizers, device="cpu", capture=True) as pipeline:
        for number in range(len(batches)):
            is_skipped = False
            try:
                pipeline.progress(iterator)
            except IndexError:
                is_skipped = True
            assert isinstance(pipeline.engine, PaddedEngine) == (number > 0)
            is_padded = isinstance(pipeline.engine, PaddedEngine)
            yield int(is_skipped), pipeline.engine.capacity if is_padded else None


class FailsOnTheSecondRank(torch.optim.SGD):
    """In its second step."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        if self.num_steps == 2 and dist.get_rank() == 1:
            raise RuntimeError("out of memory")
        return super().step(closure)


def fail_on_one_rank() -> tuple[str, str]:
    """Errors and warnings of a first padded step that fails on one rank, in its update."""
    case = CASES[0]
    model = make_model(case, "meta")
    torchembed.shard_embeddings(model, case.mesh(), case.plan(dist.get_world_size()))
    own = FailsOnTheSecondRank([{"params": []}], lr=1.0)
    optimizers, with_loss = [make_optimizer(case, model), own], WithLoss(model)
    pipeline = TrainPipeline(with_loss, None, optimizers, device="cpu", capture=True)
    batches = iter([static_batch(case, dist.get_rank(), step, NO_RANK) for step in range(2)])
    pipeline.progress(batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError) as raised:
            pipeline.progress(batches)
    pipeline.close()
    return str(raised.value), str(caught[-1].message)


def on_gloo(runs: list[tuple[Case, int, bool]]) -> tuple[list[dict[str, Any]], tuple[str, str]]:
    """All that gloo's ranks do, in one launch."""
    return train_in_jagged_steps(runs), fail_on_one_rank()


def test_jagged_steps_equal_plain_ones() -> None:
    plain = [*((case, NO_RANK) for case in CASES), *((case, 1) for case in CASES[1:3])]
    runs = [(*run, is_padded) for run in plain for is_padded in (False, True)]
    runs += [(RECORDED, NO_RANK, True), (ROW_WISE, NO_RANK, True)]
    results, failures = zip(*run_on_ranks(2, on_gloo, runs), strict=True)
    for error, _ in failures:
        assert error.startswith("a train step failed, on this rank or another one, when it had")
    _, warning = failures[1]
    assert "so it runs eagerly from now on: RuntimeError: out of memory" in warning
    for number, (case, bad_rank, _) in enumerate(runs):
        of_ranks = [rank_results[number] for rank_results in results]
        batch_of = skewed_batch if case in (ROW_WISE, RECORDED) else static_batch
        expected = train_plainly(case, 2, bad_rank, batch_of=batch_of)
        assert_equal_rows([result["rows"] for result in of_ranks], expected, str(case))
        skipped = [int(step == BAD_STEP and bad_rank == 1) for step in range(NUM_STEPS)]
        assert [result["skipped"] for result in of_ranks] == [skipped, skipped]
        assert [result["threads"] for result in of_ranks] == [NOT_THE_MAIN_ONE] * 2, case
    capacities, others = (rank_results[-1]["capacities"] for rank_results in results)
    assert capacities == others
    before, after = capacities[SKEWED_STEP - 1 : SKEWED_STEP + 1]
    assert before.num_ids == after.num_ids, "the buffers were too small"
    assert before.per_call < after.per_call
    # The first batch is looked up by the model's own forward, in no epoch.
    for rank_results in results:
        trained = rank_results[-2]["trained_epochs"]
        assert trained
        assert all(epochs == list(range(1, NUM_STEPS)) for epochs in trained)


NUM_STEPS_ON_GPUS, PARTIAL_STEP = 20, 16


def gpu_batch(case: Case, rank: int, step: int, bad_rank: int) -> torchembed.SparseFeatures:
    if step == PARTIAL_STEP:
        return make_batch(case, rank, step, num_samples=1 + rank % 2)
    return static_batch(case, rank, step, bad_rank)


def train_over_nccl(runs: list[tuple[Case, int]]) -> list[dict[str, Any]]:
    """On a rank of NCCL, with a last but few smaller batch: its rows after training, what was
    raised and warned of, and whether steps were graphs."""
    rank, results = dist.get_rank(), []
    for case, bad_rank in runs:
        model = make_model(case, "meta")
        torchembed.shard_embeddings(model, case.mesh("cuda"), case.plan(dist.get_world_size()))
        optimizer, with_loss = make_optimizer(case, model), WithLoss(model)
        optimizers = [] if optimizer is None else [optimizer]
        pipeline = TrainPipeline(with_loss, None, optimizers, device=f"cuda:{rank}")
        batches = iter(
            [
                gpu_batch(case, rank, step, bad_rank).pin_memory()
                for step in range(NUM_STEPS_ON_GPUS)
            ]
        )
        errors, captured = [], []
        waiting: set[str] = set()
        with warnings.catch_warnings(record=True) as caught, pipeline:
            warnings.simplefilter("always")
            for number in range(10**9):
                # Before: first steps, capture; after: a smaller batch, that runs eagerly.
                may_wait = not 8 <= number < PARTIAL_STEP - 2
                torch.cuda.set_sync_debug_mode("default" if may_wait else "error")
                try:
                    with threads_that_wait() as threads:
                        pipeline.progress(batches)
                    if not may_wait:
                        waiting |= threads
                except IndexError as error:
                    errors.append(str(error))
                except StopIteration:
                    break
                captured.append(pipeline.engine.is_captured)
        told = [str(w.message) for w in caught if "captured" in str(w.message)]
        results.append(
            {
                "rows": held_rows(model),
                "errors": errors,
                "captured": captured[-1],
                "told": told,
                "waiting": waiting,
            }
        )
    return results


def assert_trained_without_waiting(
    case: Case, bad_rank: int, of_ranks: list[dict[str, Any]]
) -> None:
    """Assert it of the results of :func:`train_over_nccl` on all ranks."""
    num_ranks = len(of_ranks)
    expected = train_plainly(
        case, num_ranks, bad_rank, "cuda", num_steps=NUM_STEPS_ON_GPUS, batch_of=gpu_batch
    )
    assert_equal_rows([result["rows"] for result in of_ranks], expected, str(case))
    for rank, result in enumerate(of_ranks):
        assert result["told"] == [], case
        assert result["waiting"] <= NOT_THE_MAIN_ONE, case
        assert result["captured"], case
        errors = result["errors"]
        assert len(errors) == (bad_rank < num_ranks), errors
        if errors:
            mine = f"value {2**20};" if rank == bad_rank else "another rank's batch"
            assert mine in errors[0]


FROZEN = [
    Case(placements=dict.fromkeys("abcd", "table_wise")),
    Case(placements=dict.fromkeys("abcd", "table_wise"), fixed=True),
]


def train_with_a_frozen_table(cases: list[Case]) -> list[list[dict[str, Any]]]:
    """On a rank of NCCL, eagerly and captured: its rows, where the only rank that holds table "a"
    freezes it half-way."""
    rank, results = dist.get_rank(), []
    for case in cases:
        of_case = []
        for capture in (False, True):
            model = make_model(case, "meta")
            torchembed.shard_embeddings(model, case.mesh("cuda"), case.plan(dist.get_world_size()))
            optimizer, with_loss = make_optimizer(case, model), WithLoss(model)
            optimizers = [] if optimizer is None else [optimizer]
            pipeline = TrainPipeline(
                with_loss, None, optimizers, device=f"cuda:{rank}", capture=capture
            )
            batches = iter([static_batch(case, rank, step, NO_RANK) for step in range(20)])
            with pipeline:
                for step in range(20):
                    if step == 10:
                        for name, parameter in model.tables.named_parameters():
                            parameter.requires_grad_(".a." not in name)
                        pipeline.take_up_changes()
                    pipeline.progress(batches)
            of_case.append(held_rows(model))
        results.append(of_case)
    return results


def assert_same_rows(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Assert that a rank holds the same, bit for bit."""
    assert one.keys() == other.keys()
    for name, (extent, rows, states) in one.items():
        assert other[name][0] == extent
        assert (other[name][1] == rows).all(), name
        assert all((a == b).all() for a, b in zip(other[name][2], states, strict=True)), name


def on_a_gpu(runs: list[tuple[Case, int]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """All that NCCL's ranks do, in one launch."""
    return train_over_nccl(runs), train_with_a_frozen_table(FROZEN)


@pytest.mark.gpu
def test_jagged_steps_wait_for_nothing_on_all_gpus() -> None:
    num_ranks = torch.cuda.device_count()
    runs = [*((case, NO_RANK) for case in CASES), *((c, num_ranks - 1) for c in CASES[1:3])]
    found = run_on_ranks(num_ranks, on_a_gpu, runs, backend="cpu:gloo,cuda:nccl")
    results, frozen = zip(*found, strict=True)
    for number, (case, bad_rank) in enumerate(runs):
        assert_trained_without_waiting(case, bad_rank, [of_rank[number] for of_rank in results])
    # A table that one rank froze half-way is the same, captured or not.
    for of_rank in frozen:
        for eager, captured in of_rank:
            assert_same_rows(eager, captured)
