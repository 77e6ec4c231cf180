"""Training, evaluation and checkpoints over two ranks, with unequal numbers of batches."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import (
    NUM_ROWS,
    TinyModel,
    linear_loss,
    make_batch,
    make_batches,
    make_optimizers,
)
from torchembed.core import ranks
from torchembed.data import Batch
from torchembed.tables import table_of
from torchembed.training import (
    CheckpointFolder,
    Evaluation,
    TrainingRun,
    TrainPipeline,
    average_buffers,
    evaluate,
    in_step,
    train,
)

NUM_RANKS = 2
UNEVEN = {
    "one rank has fewer": ((8, 4, 2, 8), (2, 8)),
    "one rank has none": ((), (4, 2)),
    "no rank has any": ((), ()),
}
"""Sizes of the batches of each rank."""
PLANS: dict[str, dict[str, str]] = {
    placement: {f"tables.embedding_bags.{key}": placement for key in ("f0", "f1")}
    for placement in ("row_wise", "table_wise", "data_parallel")
}


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    tables = [p for p in model.parameters() if table_of(p) is not None]
    dense = [p for p in model.parameters() if table_of(p) is None]
    return [torchembed.optim.SGD(tables, lr=0.25), torch.optim.SGD(dense, lr=0.25)]


def batches_of(rank: int, sizes: tuple[tuple[int, ...], ...]) -> Iterator[Batch]:
    return make_batches(sizes[rank], seed=rank)


def sharded(plan: dict[str, str] | None = None, *, is_deep: bool = False) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return torchembed.shard_embeddings(TinyModel(is_deep=is_deep, device="meta"), mesh, plan)


def save(path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
    CheckpointFolder(path).save(0, TrainingRun(model=model, optimizers=optimizers))


def load(path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
    assert CheckpointFolder(path).load(TrainingRun(model=model, optimizers=optimizers)) == 0


def error_of(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except (FloatingPointError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def train_unevenly(folder: Path) -> dict[str, Any]:
    results = {}
    for name, sizes in UNEVEN.items():
        model = sharded(PLANS["row_wise"])
        batches = batches_of(dist.get_rank(), sizes)
        history = train(TrainPipeline(model, linear_loss, sgd(model)), batches)
        save(folder / name, model)
        results[name] = (history.num_steps, history.num_samples, history.losses)
    return results


def coarse(model: nn.Module) -> nn.Module:
    """``model`` with parameters of ten bits after the point, so that logits are exact in whatever
    order they are summed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1024).round_().div_(1024)
    return model


def evaluate_unevenly() -> list[Evaluation]:
    model = coarse(sharded())
    return [
        evaluate(model, batches_of(dist.get_rank(), sizes))
        for sizes in (((8, 4), (3,)), ((), (5, 6)))
    ]


def save_and_load(folder: Path) -> None:
    """Go on, and load under other plans and then go on."""

    def go_on(model: nn.Module, optimizers: list[torch.optim.Optimizer], name: str) -> None:
        train(
            TrainPipeline(model, linear_loss, optimizers),
            make_batches([4, 8], seed=10 + dist.get_rank()),
        )
        save(folder / name, model, optimizers)

    saving = sharded(PLANS["row_wise"])
    of_saving = make_optimizers(saving)
    train(TrainPipeline(saving, linear_loss, of_saving), make_batches([8, 2], seed=dist.get_rank()))
    save(folder / "middle", saving, of_saving)
    go_on(saving, of_saving, "end")
    for name, plan in PLANS.items():
        model = sharded(plan)
        optimizers = make_optimizers(model, lr=0.5)
        load(folder / "middle", model, optimizers)
        go_on(model, optimizers, f"end {name}")
    from_one = sharded(PLANS["row_wise"])
    load(folder / "one process", from_one, make_optimizers(from_one))
    save(folder / "one process again", from_one)


def buffers_of_ranks() -> tuple[list[np.ndarray], list[np.ndarray]]:
    model = sharded(is_deep=True)
    batches = make_batches([8, 8], seed=dist.get_rank())
    train(TrainPipeline(model, F.binary_cross_entropy_with_logits, sgd(model)), batches)
    before = [buffer.numpy().copy() for buffer in model.buffers()]
    average_buffers(model)
    return before, [buffer.numpy() for buffer in model.buffers()]


def errors() -> list[str]:
    rank = dist.get_rank()
    batch = make_batch(2, seed=0)
    other = Batch(torch.zeros(2, 3 if rank else 2), batch.sparse, batch.labels)
    diverged = sharded()
    assert isinstance(diverged.dense, nn.Linear)
    nn.init.constant_(diverged.dense.bias, torch.nan)
    return [
        error_of(next, in_step([other], "cpu")),
        error_of(evaluate, diverged, make_batches([2])),
        error_of(evaluate, diverged, []),
    ]


def gather() -> list[float] | None:
    rows = torch.arange(3.0 - 2 * dist.get_rank()) + 10 * dist.get_rank()
    gathered = ranks.gather_on_first_rank(rows)
    return None if gathered is None else gathered.tolist()


def told_by_gpus_only(folder: Path) -> list[Any]:
    """The words of ranks to each other where their process group carries no CPU tensors."""
    rank = dist.get_rank()
    groups = iter(dist.FileStore(str(folder / name), NUM_RANKS) for name in ("gpu", "cpu"))

    def join_by(backend: str) -> None:
        dist.destroy_process_group()
        dist.init_process_group(backend, rank=rank, world_size=NUM_RANKS, store=next(groups))

    join_by("cuda:gloo")
    with pytest.raises(RuntimeError, match="must carry CPU tensors as well as the device's"):
        ranks.check_cpu_backend()
    ranks.make_cpu_group()
    ranks.check_cpu_backend()
    least = ranks.start_minimum(3 + rank, -rank)
    assert least() is least()
    told = [
        *least(),
        *ranks.any_rank_each(rank == 1, False),
        *ranks.sum_over_ranks(torch.tensor([1.5, rank])).tolist(),
        *ranks.gather_objects(str(rank)),
        ranks.from_first_rank(("of", rank)),
        gather(),
    ]
    join_by("gloo")
    return told


def all_cases(folder: Path) -> dict[str, Any]:
    save_and_load(folder)
    return {
        "uneven": train_unevenly(folder),
        "evaluations": evaluate_unevenly(),
        "buffers": buffers_of_ranks(),
        "errors": errors(),
        "gathered": gather(),
        "gpus only": told_by_gpus_only(folder),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    """Results of each rank; one launch for all tests."""
    model = TinyModel()
    optimizers = make_optimizers(model)
    train(TrainPipeline(model, linear_loss, optimizers), make_batches([8, 4]))
    save(folder / "one process", model, optimizers)
    return run_on_ranks(NUM_RANKS, all_cases, folder)


def loaded(path: Path) -> dict[str, Tensor]:
    model = TinyModel()
    load(path, model)
    return dict(model.state_dict())


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def mean_gradient_steps(sizes: tuple[tuple[int, ...], ...]) -> TinyModel:
    """By hand: each step's gradients are the mean over ranks, of which an empty one adds zero."""
    model = TinyModel()
    optimizers = sgd(model)
    streams = [batches_of(rank, sizes) for rank in range(NUM_RANKS)]
    while batches := [batch for batch in (next(stream, None) for stream in streams) if batch]:
        for batch in batches:
            logits = model(batch.dense, batch.sparse)[:, 0]
            (linear_loss(logits, batch.labels) / NUM_RANKS).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_with_fewer_batches_end_cleanly(
    name: str, results: list[dict[str, Any]], folder: Path
) -> None:
    sizes = UNEVEN[name]
    num_steps, num_samples, losses = results[0]["uneven"][name]
    assert (num_steps, num_samples) == (max(map(len, sizes)), sum(map(sum, sizes)))
    assert results[1]["uneven"][name] == (num_steps, num_samples, losses)
    assert_same(loaded(folder / name), dict(mean_gradient_steps(sizes).state_dict()))


def test_evaluation_covers_the_rows_of_all_ranks(results: list[dict[str, Any]]) -> None:
    for number, sizes in enumerate((((8, 4), (3,)), ((), (5, 6)))):
        rows = [batch for rank in range(NUM_RANKS) for batch in batches_of(rank, sizes)]
        expected = evaluate(coarse(TinyModel()), rows)
        for of_rank in results:
            assert of_rank["evaluations"][number] == expected


def test_checkpoints_do_not_depend_on_the_plan(results: list[dict[str, Any]], folder: Path) -> None:
    for name in PLANS:
        assert_same(loaded(folder / f"end {name}"), loaded(folder / "end"))
    assert_same(loaded(folder / "one process again"), loaded(folder / "one process"))
    assert len(loaded(folder / "end")["tables.embedding_bags.f0.weight"]) == NUM_ROWS


def test_one_process_goes_on_from_two(results: list[dict[str, Any]], folder: Path) -> None:
    model = TinyModel()
    optimizers = make_optimizers(model, lr=0.5)
    load(folder / "end", model, optimizers)
    ours = {name: state for optimizer in optimizers for name, state in _named_state(optimizer)}
    for number, name in enumerate(PLANS):
        other = TinyModel()
        others = make_optimizers(other)
        load(folder / f"end {name}", other, others)
        theirs = {key: state for optimizer in others for key, state in _named_state(optimizer)}
        assert_same(ours, theirs)
        assert len(theirs) >= 6, number


def _named_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for number, entry in optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            yield f"{type(optimizer).__name__}.{number}.{name}", value


def test_buffers_become_their_mean(results: list[dict[str, Any]]) -> None:
    (first, after), (second, after_second) = (of_rank["buffers"] for of_rank in results)
    assert any((one != two).any() for one, two in zip(first, second, strict=True))
    for one, two, mean, other in zip(first, second, after, after_second, strict=True):
        np.testing.assert_array_equal(mean, other)
        np.testing.assert_array_equal(mean, one if one.dtype == np.int64 else (one + two) / 2)


def test_errors_reach_every_rank(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        layout, diverged, nothing = of_rank["errors"]
        assert layout.startswith("ValueError: batches must have the same features and dense")
        assert diverged.startswith("FloatingPointError: 4 of 4 logits are not finite")
        assert nothing.startswith("ValueError: there must be at least one held-out row")


def test_rows_of_unequal_number_are_gathered(results: list[dict[str, Any]]) -> None:
    assert results[0]["gathered"] == [0.0, 1.0, 2.0, 10.0]
    assert results[1]["gathered"] is None


def test_ranks_tell_each_other_through_the_cpu(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        *told, gathered = of_rank["gpus only"]
        assert told == [3, -1, True, False, 3.0, 1.0, "0", "1", ("of", 0)]
        assert gathered == of_rank["gathered"]
