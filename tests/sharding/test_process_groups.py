"""Process groups of sharded models: made once, lent again, and of one living model at a time."""

import contextlib
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import Case, make_batch, make_model, vectors_of

CASE = Case(
    placements={"a": "column_wise", "b": "row_wise", "c": "table_wise", "d": "data_parallel"},
    column_ranks=(0, 1),
)


IS_EXITING = 0x4
"""Flag of a thread that may be joined already, while the kernel still lists it."""


def num_threads() -> int:
    """Threads of this process that have not ended."""
    num_running = 0
    for number in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # Behind the name, which may have spaces, in parentheses.
            fields = Path("/proc/self/task", number, "stat").read_text().rpartition(") ")[2].split()
            num_running += not int(fields[6]) & IS_EXITING
    return num_running


def train(model: torch.nn.Module) -> None:
    optimizer = torchembed.optim.RowwiseAdagrad(list(model.parameters()), lr=0.125)
    vectors_of(model.tables(make_batch(CASE, dist.get_rank(), 0))).sum().backward()
    optimizer.step()


def sharded(mesh: DeviceMesh) -> torch.nn.Module:
    model = make_model(CASE, "meta")
    return torchembed.shard_embeddings(model, mesh, CASE.plan(mesh.size()))


def repeated() -> list[list[int]]:
    """Threads after each of several shardings: over all ranks, and over the first two."""
    of_all, of_part = [], []
    for _ in range(20):
        train(sharded(init_device_mesh("cpu", (3,))))
        of_all.append(num_threads())
    part = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        for _ in range(5):
            train(sharded(DeviceMesh.from_group(part, "cpu")))
            of_part.append(num_threads())
    return [of_all, of_part]


def two_models() -> bool:
    """True if two models that live at once have groups of their own; both train."""
    mesh = init_device_mesh("cpu", (2,))
    models = [sharded(mesh), sharded(mesh)]
    for model in (*models, *models):
        train(model)
    one, other = (model.tables.ranks for model in models)
    groups = {one.gradient_group, one.sizes_group, other.gradient_group, other.sizes_group}
    return len(groups) == 4


def ended(folder: str) -> list[int]:
    """Threads before the first process group, after it, and after another one."""
    dist.destroy_process_group()
    counts = [num_threads()]
    for number in range(2):
        store = dist.FileStore(f"{folder}/{number}", 1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        mesh = init_device_mesh("cpu", (1,))
        model = make_model(CASE, "meta")
        torchembed.shard_embeddings(model, mesh, {"tables.embedding_bags.b": "row_wise"})
        del mesh, model
        dist.destroy_process_group()
        gc.collect()
        counts.append(num_threads())
    store = dist.FileStore(f"{folder}/last", 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    return counts


def test_further_shardings_start_no_threads() -> None:
    for of_all, of_part in run_on_ranks(3, repeated):
        assert len(set(of_all)) == 1
        assert len(set(of_part)) <= 1


def test_two_living_models_share_no_group() -> None:
    assert run_on_ranks(2, two_models) == [True, True]


def test_groups_end_with_the_process_group(tmp_path: Path) -> None:
    ((before, *after),) = run_on_ranks(1, ended, str(tmp_path))
    assert after == [before, before]
