"""Checkpoints of several ranks: other plans and numbers of ranks, and what fails on one of them."""

import dataclasses
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.killed_run import DataPosition
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import (
    KEYS,
    TinyModel,
    linear_loss,
    make_batch,
    make_optimizers,
    step_by_hand,
)
from torchembed.checkpoints.files import save_planner
from torchembed.core import ranks
from torchembed.core.features import SparseFeatures
from torchembed.data import Batch
from torchembed.training import CheckpointFolder, TrainingRun

GLOBAL_BATCH = 8
NUM_STEPS = 3
SMALL_CHUNK_BYTES = 50
"""Three rows of a table."""
LIMIT_BYTES = 3000
"""Limit of a file: less than a rank's part of a checkpoint."""


def new_run(placement: str | None = None, *, is_deep: bool = False) -> TrainingRun:
    """Sharded where a placement is given."""
    model: nn.Module = TinyModel(is_deep=is_deep, device=None if placement is None else "meta")
    if placement is not None:
        plan = {f"tables.embedding_bags.{key}": placement for key in KEYS}
        torchembed.shard_embeddings(model, init_device_mesh("cpu", (ranks.world_size(),)), plan)
    position = DataPosition()
    return TrainingRun(
        model=model, optimizers=make_optimizers(model), others={"position": position}
    )


def own_part(batch: Batch) -> Batch:
    """This rank's samples of a batch of all."""
    size = GLOBAL_BATCH // ranks.world_size()
    mine = slice(ranks.rank() * size, (ranks.rank() + 1) * size)
    offsets, values = batch.sparse.offsets, []
    assert offsets is not None
    lengths = offsets.diff().reshape(len(KEYS), GLOBAL_BATCH)[:, mine]
    for feature in range(len(KEYS)):
        first = feature * GLOBAL_BATCH + mine.start
        values.append(batch.sparse.values[offsets[first] : offsets[first + size]])
    sparse = SparseFeatures(
        keys=KEYS,
        values=torch.cat(values),
        batch_size=size,
        offsets=torch.cat([offsets.new_zeros(1), lengths.flatten().cumsum(0)]),
    )
    return Batch(batch.dense[mine], sparse, batch.labels[mine])


def losses_of(run: TrainingRun, num_steps: int = NUM_STEPS) -> list[float]:
    """Losses of the next steps, means over the whole batch; the batches are the same on any number
    of ranks."""
    position = run.others["position"]
    assert isinstance(position, DataPosition)
    losses = []
    for _ in range(num_steps):
        batch = own_part(make_batch(GLOBAL_BATCH, seed=position.num_taken))
        loss = step_by_hand(run.model, linear_loss, run.optimizers, batch)
        losses.append(float(ranks.sum_over_ranks(loss)) / ranks.world_size())
        position.num_taken += 1
    return losses


def table_wise_on_four(folder: Path) -> list[float]:
    save_planner.CHUNK_BYTES = SMALL_CHUNK_BYTES
    run = new_run("table_wise")
    losses_of(run)
    CheckpointFolder(folder / "four").save(NUM_STEPS, run)
    losses = losses_of(run, 2 * NUM_STEPS)
    CheckpointFolder(folder / "four to the end").save(3 * NUM_STEPS, run)
    return losses


def row_wise_on_two(folder: Path) -> dict[str, Any]:
    run = new_run("row_wise")
    torch.manual_seed(50 + ranks.rank())
    before = torch.get_rng_state()
    assert CheckpointFolder(folder / "four").load(run) == NUM_STEPS
    assert torch.equal(torch.get_rng_state(), before)
    losses = losses_of(run)
    CheckpointFolder(folder / "two").save(2 * NUM_STEPS, run)
    again = [
        new_run(placement)
        for placement in ("table_wise", "data_parallel", "column_wise", "row_wise")
    ]
    for other in again:
        torch.manual_seed(7)
        assert CheckpointFolder(folder / "two").load(other) == 2 * NUM_STEPS
        assert torch.equal(torch.get_rng_state(), before), "each rank's own comes back"
    return {"losses": losses, "at the end": [losses_of(other) for other in (run, *again)]}


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def asynchronous(folder: Path) -> bool:
    run, loaded = new_run("row_wise"), new_run("row_wise")
    losses_of(run)
    checkpoints = CheckpointFolder(folder / "asynchronous")
    for step in range(3):  # the second and third wait for the one before
        then = [parameter.detach().clone() for parameter in run.model.parameters()]
        checkpoints.save(step, run, wait=False)
        losses_of(run)
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    checkpoints.load(loaded)
    return all(map(torch.equal, loaded.model.parameters(), then))


def one_rank_cannot_write(folder: Path) -> list[str]:
    """The files of rank 1 may not grow: that is its full disk."""
    run = new_run("row_wise")
    big = torch.nn.Parameter(torch.zeros(LIMIT_BYTES))
    run.model.register_parameter("big", big)
    checkpoints = CheckpointFolder(folder / "full")
    checkpoints.save(1, new_run("row_wise"))
    errors = []
    for wait in (True, False):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if ranks.rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, before[1]))

        def save(wait: bool = wait) -> None:
            checkpoints.save(2, run, wait=wait)
            checkpoints.wait()

        errors.append(error_of(save))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    errors.append(str(checkpoints.steps()))
    checkpoints.save(2, run)
    return [*errors, str(checkpoints.steps())]


def failures(folder: Path) -> dict[str, Any]:
    run, rank = new_run("row_wise"), ranks.rank()
    CheckpointFolder(folder / "a copy").save(2 * NUM_STEPS, run)
    apart = CheckpointFolder(folder / f"only {rank}")
    in_memory = CheckpointFolder(f"memory://{folder.name}")
    errors = {
        "save apart": error_of(lambda: apart.save(1, run)),
        "save in memory": error_of(lambda: in_memory.save(1, run)),
        "one has no folder": error_of(
            lambda: CheckpointFolder(folder / "two" if rank == 0 else folder / "none").load(run)
        ),
        "one has another": error_of(
            lambda: CheckpointFolder(folder / ("two" if rank == 0 else "a copy")).load(run)
        ),
        "one optimizer is strange": error_of(
            lambda: CheckpointFolder(folder / "strange").save(
                1, run if rank == 0 else dataclasses.replace(run, optimizers=strange(run))
            )
        ),
    }
    fewer = run if rank == 0 else dataclasses.replace(run, optimizers=run.optimizers[1:])
    errors["fewer optimizers"] = error_of(lambda: CheckpointFolder(folder / "few").save(1, fewer))
    damaged = folder / "damaged"
    CheckpointFolder(damaged).save(1, run)
    dist.barrier()
    file = damaged / "step-000000001" / "__1_0.distcp"
    if rank == 0:
        whole = bytearray(file.read_bytes())
        whole[-100] ^= 1
        file.write_bytes(whole)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    dist.barrier()
    errors["one bit"] = error_of(lambda: CheckpointFolder(damaged).load(run))
    deep = new_run("table_wise", is_deep=True)
    errors["another model"] = error_of(lambda: CheckpointFolder(folder / "two").load(deep))
    errors["unchanged"] = all(map(torch.equal, run.model.parameters(), before))
    return errors


def strange(run: TrainingRun) -> list[torch.optim.Optimizer]:
    return [run.optimizers[0], torch.optim.Adam([nn.Parameter(torch.zeros(3))])]


def cases_on_two(folder: Path) -> dict[str, Any]:
    save_planner.CHUNK_BYTES = SMALL_CHUNK_BYTES
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    return {
        "resumed": row_wise_on_two(folder),
        "asynchronous": asynchronous(folder),
        "full": one_rank_cannot_write(folder),
        "failures": failures(folder),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> list[float]:
    """Losses on four ranks, from the first checkpoint on."""
    return run_on_ranks(4, table_wise_on_four, folder)[0]


@pytest.fixture(scope="module")
def on_two(folder: Path, uninterrupted: list[float]) -> list[dict[str, Any]]:
    return run_on_ranks(2, cases_on_two, folder)


def tolerance(losses: list[float]) -> float:
    """Tolerance of a mean of 8 numbers that may be summed in another order, of dot products of
    10."""
    return 2 * (GLOBAL_BATCH + 10) * torch.finfo(torch.float32).eps * max(map(abs, losses))


def whole_state(path: Path) -> dict[str, Tensor]:
    run = new_run()
    CheckpointFolder(path).load(run)
    return dict(run.model.state_dict())


def test_losses_go_on_under_another_plan_and_on_fewer_ranks(
    folder: Path, uninterrupted: list[float], on_two: list[dict[str, Any]]
) -> None:
    one = new_run()
    assert CheckpointFolder(folder / "two").load(one) == 2 * NUM_STEPS
    at_the_end = losses_of(one)
    for of_rank in on_two:
        resumed = of_rank["resumed"]
        assert resumed["losses"] == pytest.approx(
            uninterrupted[:NUM_STEPS], rel=0, abs=tolerance(uninterrupted)
        )
        for losses in (*resumed["at the end"], at_the_end):
            assert losses == pytest.approx(
                uninterrupted[NUM_STEPS:], rel=0, abs=tolerance(uninterrupted)
            )
    # Gradients are exact in this model, so its parameters are, too.
    for name, value in whole_state(folder / "four to the end").items():
        assert torch.equal(one.model.state_dict()[name], value), name


def test_training_may_go_on_while_a_checkpoint_is_written(on_two: list[dict[str, Any]]) -> None:
    assert [of_rank["asynchronous"] for of_rank in on_two] == [True, True]


def test_a_full_disk_of_one_rank_ends_the_save_of_all(on_two: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(on_two):
        *errors, steps, after = of_rank["full"]
        for error in errors:
            here = "OSError: [Errno 27] File too large"
            there = "RuntimeError: rank 1 could not save a checkpoint of step 2 in "
            assert error.startswith(here if rank == 1 else there), error
            assert error.endswith(here)
        assert (steps, after) == ("[1]", "[1, 2]")


@pytest.mark.parametrize(
    ("case", "here", "failing"),
    [
        ("save apart", "ValueError: path must be one folder that all ranks see, and rank 1", 1),
        ("save in memory", "ValueError: path must be one folder that all ranks see", 1),
        ("one has no folder", "ValueError: path must be one folder that all ranks see", 1),
        ("one has another", "ValueError: path must be one folder that all ranks see", 1),
        ("one optimizer is strange", "ValueError: optimizers must hold parameters of the", 1),
        ("one bit", "ValueError: file ", 1),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(
    case: str, here: str, failing: int, on_two: list[dict[str, Any]]
) -> None:
    errors = [of_rank["failures"][case] for of_rank in on_two]
    assert errors[failing].startswith(here)
    assert errors[1 - failing].startswith(f"RuntimeError: rank {failing} could not ")
    assert errors[1 - failing].endswith(errors[failing])


def test_optimizers_that_differ_are_named(on_two: list[dict[str, Any]]) -> None:
    first, second = (of_rank["failures"]["fewer optimizers"] for of_rank in on_two)
    assert first == second
    assert (
        "got 1 and ['Adagrad of torchembed', 'Adam of torch'] on rank 0, 1 and ['Adam of torch'] on"
        in first
    )


def test_all_ranks_name_the_mismatches_of_all(on_two: list[dict[str, Any]]) -> None:
    first, second = (of_rank["failures"]["another model"] for of_rank in on_two)
    assert first == second
    assert "model.dense.0.weight was not saved" in first
    assert "model.dense.weight is not in the run" in first
    assert "f0" not in first
    assert all(of_rank["failures"]["unchanged"] for of_rank in on_two)
