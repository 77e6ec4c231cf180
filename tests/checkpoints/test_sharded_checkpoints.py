"""What is saved under one placement is loaded under every other, bit for bit.

Each pair of placements is tried with one of two optimizers and dtypes, which take turns.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import (
    NUM_STEPS,
    Case,
    assert_equal_rows,
    exact_loss,
    held_rows,
    make_batch,
    make_model,
    make_optimizer,
    train_unsharded,
    vectors_of,
    whole_rows,
)
from torchembed.sharding import Placement
from torchembed.training import CheckpointFolder, TrainingRun

CASES = {
    f"{placement.value}-{optimizer}": Case(
        placements=dict.fromkeys("abcd", placement.value), optimizer=optimizer, dtype=dtype
    )
    for placement in Placement
    for optimizer, dtype in (("RowwiseAdagrad", torch.float32), ("Adam", torch.bfloat16))
}


PLACEMENTS = list(Placement)


def is_tried(saved: Case, loaded: Case) -> bool:
    """True of one optimizer for each pair of placements, and of each for every placement."""
    places = (PLACEMENTS.index(Placement(case.placements["a"])) for case in (saved, loaded))
    optimizer = ("RowwiseAdagrad", "Adam")[sum(places) % 2]
    return saved.optimizer == loaded.optimizer == optimizer


def save_all(folder: str) -> None:
    for name, case in CASES.items():
        case = dataclasses.replace(case, num_nodes=2)
        model = make_model(case, "meta")
        torchembed.shard_embeddings(model, case.mesh(), case.plan(dist.get_world_size()))
        optimizer = make_optimizer(case, model)
        for step in range(NUM_STEPS):
            exact_loss(vectors_of(model.tables(make_batch(case, dist.get_rank(), step)))).backward()
            optimizer.step()
        CheckpointFolder(Path(folder, name)).save(
            NUM_STEPS, TrainingRun(model=model, optimizers=[optimizer])
        )


def load_all(folder: str) -> dict[str, dict[str, Any]]:
    """By the placement that was saved and the one that it is loaded under: what this rank holds."""
    held: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        model = make_model(case, "meta")
        torchembed.shard_embeddings(model, case.mesh(), case.plan(dist.get_world_size()))
        optimizer = make_optimizer(case, model)
        run = TrainingRun(model=model, optimizers=[optimizer])
        for saved, other in CASES.items():
            if is_tried(other, case):
                for tensor in (*model.parameters(), *_states(model)):
                    tensor.detach().fill_(-7.0)
                CheckpointFolder(Path(folder, saved)).load(run)
                held[f"{saved} under {name}"] = held_rows(model)
    return held


def _states(model: torch.nn.Module) -> list[torch.Tensor]:
    groups = {table.group for table in model.tables._local.values()}
    return [state for group in groups for state in group.states]


def test_every_placement_loads_under_every_other(tmp_path: Path) -> None:
    run_on_ranks(4, save_all, str(tmp_path))
    expected = {name: train_unsharded(case, 4)["rows"] for name, case in CASES.items()}
    of_ranks = run_on_ranks(2, load_all, str(tmp_path))
    for pair in of_ranks[0]:
        assert_equal_rows([held[pair] for held in of_ranks], expected[pair.split()[0]], pair)
    assert len(of_ranks[0]) == 5 * 5
    for name, case in CASES.items():
        model = make_model(case)
        optimizer = make_optimizer(case, model)
        run = TrainingRun(model=model, optimizers=[optimizer])
        CheckpointFolder(tmp_path / name).load(run)
        loaded = {
            table: ((slice(None), slice(None)), rows, states)
            for table, (rows, states) in whole_rows(model).items()
        }
        assert_equal_rows([loaded], expected[name], name)
