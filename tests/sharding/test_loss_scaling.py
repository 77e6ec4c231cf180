"""``torch.amp.GradScaler`` where tables are on several ranks: these skip a step together."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import Case, held_rows, make_batch, make_model, vectors_of
from torchembed.modules.sharded.model_plan import table_specs
from torchembed.sharding import Placement, ShardingPlan
from torchembed.sharding.planning.plan import place_table

CASE = Case(placements={}, fixed=True)
NUM_SAMPLES = 4
OURS = "our scaler"
# Of three ranks the last holds nothing; table "b" is on the first alone.
RANKS_OF = {"a": (0, 1), "b": (0,), "c": (0, 1), "d": (1,)}
PLACEMENT_OF = {
    "a": Placement.COLUMN_WISE,
    "b": Placement.TABLE_WISE,
    "c": Placement.COLUMN_WISE,
    "d": Placement.TABLE_WISE,
}


def made_plan(num_ranks: int) -> ShardingPlan:
    specs = table_specs(make_model(CASE, "meta"))
    tables = []
    for path, spec in specs.items():
        name = path.rsplit(".", 1)[1]
        tables.append(place_table(path, spec, PLACEMENT_OF[name], RANKS_OF[name]))
    return ShardingPlan(num_ranks=num_ranks, tables=tuple(tables))


def skipped_steps(
    optimizer_name: str, scaler_kind: type[torch.amp.GradScaler] = torch.amp.GradScaler
) -> list[dict[str, Any]]:
    """The state of this rank before training, after a step with one infinite gradient of table "b"
    on the last rank, after one without, and (with SGD) after one in which rank 1 discarded its
    gradients."""
    model = make_model(CASE, "meta")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.top = nn.Linear(37, 1)
    torchembed.shard_embeddings(model, mesh, made_plan(mesh.size()))
    parameters = list(model.tables.parameters())
    kind = getattr(torchembed.optim, optimizer_name)
    tables = kind(parameters, lr=0.125) if parameters else None
    dense = torch.optim.SGD(model.top.parameters(), lr=0.125)
    scaler = scaler_kind("cpu", init_scale=4.0, growth_interval=100)
    seen = [{"rows": copy.deepcopy(held_rows(model)), "scale": 4.0}]
    for step in range(3):
        values = vectors_of(model.tables(make_batch(CASE, dist.get_rank(), 0)))
        values = values.view(NUM_SAMPLES, -1)
        bad = float("inf") if step == 0 and dist.get_rank() == 2 else 1.0
        loss = model.top(values.detach()).sum() + values.sum() + (values[0, 16] * bad)
        scaler.scale(loss).backward()
        if tables is not None:
            if step == 2 and dist.get_rank() == 1 and optimizer_name == "SGD":
                tables.zero_grad()
            scaler.step(tables)
        scaler.step(dense)
        scaler.update()
        seen.append({"rows": copy.deepcopy(held_rows(model)), "scale": scaler.get_scale()})
    return seen


def skipped_by_all() -> dict[str, list[dict[str, Any]]]:
    skipped = {name: skipped_steps(name) for name in ("SGD", "RowwiseAdagrad")}
    return skipped | {OURS: skipped_steps("RowwiseAdagrad", torchembed.optim.GradScaler)}


def assert_changed(before: Any, after: Any, *, does_change: bool) -> None:
    for name, (_, rows, _) in after["rows"].items():
        assert np.isfinite(rows).all(), name
        assert np.array_equal(rows, before["rows"][name][1]) is not does_change, name


def test_ranks_skip_a_step_together() -> None:
    for rank, by_optimizer in enumerate(run_on_ranks(3, skipped_by_all)):
        for name, (before, skipped, taken, last) in by_optimizer.items():
            assert set(before["rows"]) == {n for n, ranks in RANKS_OF.items() if rank in ranks}
            assert_changed(before, skipped, does_change=False)
            assert_changed(skipped, taken, does_change=True)
            assert_changed(taken, last, does_change=rank != 1 or name != "SGD")
            # Torch's cannot see the tables; ours falls on the rank that has none, too.
            scale = 2.0 if name == OURS else 4.0
            assert [seen["scale"] for seen in (skipped, taken, last)] == [scale] * 3


def scaled_on_some_processes() -> str:
    """Of three processes the mesh has two, of which one holds tables."""
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() > 1:
        return ""
    model = make_model(CASE, "meta")
    specs = table_specs(model)
    torchembed.shard_embeddings(
        model,
        mesh,
        ShardingPlan(
            num_ranks=2,
            tables=tuple(
                place_table(name, spec, Placement.TABLE_WISE, (0,)) for name, spec in specs.items()
            ),
        ),
    )
    parameters = list(model.parameters())
    optimizer = torchembed.optim.SGD(parameters) if parameters else None
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(vectors_of(model.tables(make_batch(CASE, dist.get_rank(), 0))).sum()).backward()
    if optimizer is None:
        return ""
    with pytest.raises(RuntimeError) as error:
        scaler.step(optimizer)
    return str(error.value)


def test_a_mesh_of_some_processes_whose_ranks_hold_no_tables_cannot_scale() -> None:
    message = run_on_ranks(3, scaled_on_some_processes)[0]
    assert message.startswith("GradScaler needs tables on every rank of a mesh that holds some of")
