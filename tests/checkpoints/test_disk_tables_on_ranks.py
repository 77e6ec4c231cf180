"""Checkpoints of sharded tables on disk: saved on some ranks, and loaded on others."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import exact_loss, made_mesh
from torchembed import Disk, Dynamic, EmbeddingBagConfig, HostMemory, SparseFeatures
from torchembed.modules.sharded.model_plan import table_specs
from torchembed.sharding import make_plan
from torchembed.tables import row_chunks, table_of
from torchembed.training import CheckpointFolder, TrainingRun

NUM_STEPS, BATCH_SIZE = 4, 6
TABLES = {"a": (40, 4, None), "b": (30, 4, None), "c": (256, 4, Dynamic()), "d": (64, 6, None)}
"""Rows, columns, and what makes it dynamic."""

SAVED = {
    "rows on disk": ("row_wise", "disk", torch.float32, "Adagrad"),
    "columns on disk": ("column_wise", "disk", torch.bfloat16, "Adam"),
    "tables on disk": ("table_wise", "disk", torch.float32, "RowwiseAdagrad"),
    "rows in host memory": ("row_wise", "host", torch.float32, "Adagrad"),
}
"""Placement, storage, dtype and optimizer of what two ranks save; its step is its number."""
PLACEMENTS = ("row_wise", "column_wise", "table_wise")
STORAGES = ("disk", "device")


def new_run(
    folder: Path, placement: str, storage: str, dtype: torch.dtype, optimizer: str
) -> TrainingRun:
    """Sharded where there is a process group."""
    folder.mkdir(exist_ok=True)
    storages = {
        "disk": Disk(path=folder, host_rows=36, cache_rows=30),
        "host": HostMemory(cache_rows=30),
        "device": None,
    }
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=num_rows,
            embedding_dim=dim,
            feature_names=(name,),
            dtype=dtype,
            dynamic=dynamic,
            storage=storages[storage],
        )
        for name, (num_rows, dim, dynamic) in TABLES.items()
    ]
    is_sharded = dist.is_initialized()
    model = nn.Module()
    model.tables = torchembed.EmbeddingBagCollection(configs, device="meta" if is_sharded else None)
    if is_sharded:
        placements = {f"tables.embedding_bags.{name}": placement for name in TABLES}
        plan = make_plan(table_specs(model), dist.get_world_size(), placements)
        torchembed.shard_embeddings(model, made_mesh("cpu", 1), plan)
    of_tables = getattr(torchembed.optim, optimizer)(
        list(model.parameters()) or [{"params": []}], lr=0.125
    )
    return TrainingRun(model=model, optimizers=[of_tables])


def batch(rank: int, step: int) -> SparseFeatures:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    limits = torch.tensor([num_rows for num_rows, _, _ in TABLES.values()])
    ids = torch.randint(1 << 30, (len(TABLES), BATCH_SIZE * 2), generator=generator)
    ids = ids % limits[:, None].clamp_max(20)
    ids[2] = ids[2] * 2**41 - 5
    return SparseFeatures(
        keys=tuple(TABLES), values=ids.flatten(), batch_size=BATCH_SIZE, hotness=(2,) * len(TABLES)
    )


def train(run: TrainingRun, steps: Iterable[int], num_ranks: int) -> None:
    """The steps that ``num_ranks`` ranks do together: this one's part of them, or all in turn."""
    for step in steps:
        run.optimizers[0].zero_grad()
        of_ranks = [dist.get_rank()] if dist.is_initialized() else range(num_ranks)
        losses = [
            exact_loss(run.model.tables(batch(rank, step)).values().float().flatten())
            for rank in of_ranks
        ]
        (torch.stack(losses).sum() / len(losses)).backward()
        run.optimizers[0].step()


Held = dict[tuple[str, int, int], tuple[Any, ...]]


def held(model: nn.Module) -> Held:
    """By table, id and column what this rank holds: the element, its states, score and last use."""
    found: Held = {}
    for table in model.tables.table_set.tables:
        for chunk in row_chunks(table, 1 << 20):
            used = [t.tolist() for t in (chunk.scores, chunk.touched) if t is not None]
            for place, key in enumerate(chunk.keys.tolist()):
                of_key = tuple(column[place] for column in used)
                for column in range(table.num_columns):
                    states = [
                        (s[place, column] if s.dim() == 2 else s[place]).item()
                        for s in chunk.states.values()
                    ]
                    element = chunk.rows[place, column].item()
                    found[table.spec.name, key, table.first_column + column] = (
                        element, *states, *of_key
                    )  # fmt: skip
    return found


def together(of_ranks: list[Held]) -> Held:
    found: Held = {}
    for of_rank in of_ranks:
        assert not found.keys() & of_rank.keys()
        found |= of_rank
    return found


def save_all(folder: str) -> list[Held]:
    found = []
    with contextlib.closing(CheckpointFolder(Path(folder, "run"), keep=9)) as checkpoints:
        for step, (name, form) in enumerate(SAVED.items(), 1):
            run = new_run(Path(folder, f"saved {name}"), *form)
            train(run, range(NUM_STEPS), 2)
            checkpoints.save(step, run, wait=step % 2 == 0)
            found.append(held(run.model))
    return found


def load_all(folder: str) -> dict[str, tuple[Held, Held]]:
    """What this rank holds of each checkpoint, loaded under each placement and storage, and after
    two more steps."""
    found = {}
    checkpoints = CheckpointFolder(Path(folder, "run"))
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    for number, (name, (saved_as, stored_in, dtype, optimizer)) in enumerate(SAVED.items(), 1):
        for placement in PLACEMENTS if num_ranks == 2 else PLACEMENTS[:1]:
            for storage in STORAGES if placement == "row_wise" else ("disk",):
                path = Path(folder, f"loaded {number} {placement} {storage}")
                run = new_run(path, placement, storage, dtype, optimizer)
                train(run, [77], 2)  # rows that are in the way
                checkpoints.load(run, number)
                assert not checkpoints.rows_left_out
                if storage == "disk" and (num_ranks, saved_as, stored_in) == (2, placement, "disk"):
                    assert any(file.stat().st_nlink > 1 for file in path.rglob("*.sst")), path
                loaded = held(run.model)
                train(run, range(NUM_STEPS, NUM_STEPS + 2), 2)
                found[f"{name} {placement} {storage}"] = loaded, held(run.model)
    return found


def test_what_two_ranks_saved_two_three_and_one_load(tmp_path: Path) -> None:
    """Under any placement, on disk and on the device: rows, states, scores and last uses; and on
    two ranks and on one training goes on as if unsharded. As many ranks under the same placement
    take the databases as they are."""
    saved = run_on_ranks(2, save_all, str(tmp_path))
    of_ranks = {n: run_on_ranks(n, load_all, str(tmp_path)) for n in (2, 3)}
    of_ranks[1] = [load_all(str(tmp_path))]
    for number, (name, form) in enumerate(SAVED.items()):
        expected = together([of_rank[number] for of_rank in saved])
        whole = new_run(tmp_path / f"whole {name}", form[0], "device", *form[2:])
        train(whole, range(NUM_STEPS), 2)
        assert held(whole.model) == expected
        train(whole, range(NUM_STEPS, NUM_STEPS + 2), 2)
        for num_ranks, of_loads in of_ranks.items():
            for load in (load for load in of_loads[0] if load.startswith(name)):
                loaded = together([of_rank[load][0] for of_rank in of_loads])
                assert loaded == expected, f"{load} on {num_ranks} ranks"
                if num_ranks < 3:
                    trained = together([of_rank[load][1] for of_rank in of_loads])
                    assert trained == held(whole.model), f"{load} on {num_ranks} ranks"


def load_with_another_seed(folder: str) -> tuple[int, bool]:
    """Lines that this rank has of a module of one table that was loaded with the seed of another,
    and whether their rows are the same."""
    runs = []
    for name in "ab":
        path = Path(folder, name)
        path.mkdir(exist_ok=True)
        storage = Disk(path=path, host_rows=40, cache_rows=30)
        bag = torchembed.EmbeddingBag(300, 4, mode="sum", storage=storage, device="meta")
        model = nn.ModuleDict({"bag": bag})
        torchembed.shard_embeddings(model, made_mesh("cpu", 1), {"bag": "row_wise"})
        optimizer = torchembed.optim.Adagrad(model.parameters(), lr=0.125)
        runs.append(TrainingRun(model=model, optimizers=[optimizer]))
    run, other = runs
    run.model["bag"](torch.arange(0, 300, 15).view(2, 10)).sum().backward()  # type: ignore[index]
    run.optimizers[0].step()
    tables = [table_of(run.model["bag"].weight) for run in runs]  # type: ignore[index]
    CheckpointFolder(Path(folder, "run")).save(1, run)
    rows = [next(row_chunks(table, 1 << 20)).rows for table in tables]
    assert not torch.equal(*rows)
    CheckpointFolder(Path(folder, "run")).load(other)
    (loaded,) = row_chunks(tables[1], 1 << 20)
    return tables[1].group.lines.store.table.num_rows(), torch.equal(loaded.rows, rows[0])


def test_modules_of_one_table_take_the_saved_seed(tmp_path: Path) -> None:
    """Another run draws another one, and rows that were never written follow from it."""
    assert run_on_ranks(2, load_with_another_seed, str(tmp_path)) == [(10, True)] * 2
