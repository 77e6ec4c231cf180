"""Errors before sharding, which name what was forgotten or broken."""

import json
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import Case, exact_loss, make_batch, make_model, vectors_of
from torchembed.checkpoints.run.training_run import TrainingRun
from torchembed.modules.sharded.model_plan import table_specs
from torchembed.sharding import Planner, ShardingPlan, make_plan
from torchembed.training import CheckpointFolder, TrainPipeline


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
def test_a_lookup_in_tables_that_were_never_sharded(pooled: bool, fixed: bool) -> None:
    case = Case(placements={}, pooled=pooled, fixed=fixed)
    model = make_model(case, "meta")
    with pytest.raises(RuntimeError, match="are on the meta device and have no rows; call shard_"):
        model.tables(make_batch(case, 0, 0))


def test_a_lookup_in_a_bag_on_the_meta_device() -> None:
    bag = torchembed.EmbeddingBag(9, 4, device="meta")
    with pytest.raises(RuntimeError, match="tables weight are on the meta device"):
        bag(torch.tensor([[1, 2]]))


def test_a_mesh_that_is_none_or_has_no_process_group() -> None:
    model = make_model(Case(placements={}), "meta")
    with pytest.raises(TypeError, match=r"mesh must be a torch.*DeviceMesh, got None; make one by"):
        torchembed.shard_embeddings(model, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"mesh must be a torch.*DeviceMesh, got 'cpu'"):
        torchembed.plan_embeddings(model, Planner(batch_size=4), "cpu")  # type: ignore[arg-type]


def after_the_process_group(folder: str) -> str:
    mesh = init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
    with pytest.raises(RuntimeError) as error:
        torchembed.shard_embeddings(make_model(Case(placements={}), "meta"), mesh)
    store = dist.FileStore(f"{folder}/another", 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    return str(error.value)


def test_a_mesh_whose_process_group_was_destroyed(tmp_path: Any) -> None:
    (message,) = run_on_ranks(1, after_the_process_group, str(tmp_path))
    assert message.startswith("mesh has no process group; call torch.distributed.init_process")


def plan_text(**changes: Any) -> str:
    plan = make_plan(table_specs(make_model(Case(placements={}), "meta")), 2)
    return json.dumps({**json.loads(plan.to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "but Expecting property name enclosed in double quotes: line 1 column 2"),
        ("[]", "but list indices must be integers"),
        ("{}", "but 'tables' is missing"),
        (plan_text(num_ranks="two"), "but num_ranks must be an integer, got 'two'"),
        (plan_text(tables=[{"table": "a"}]), "but 'placement' is missing"),
        (
            plan_text(tables=[{"table": "a", "placement": "row_wide", "shards": []}]),
            "but 'row_wide' is not a valid Placement",
        ),
        (
            plan_text(tables=[{"table": "a", "placement": "row_wise", "shards": [{"rank": 0}]}]),
            "but 'first_row' is missing",
        ),
    ],
)
def test_a_plan_that_is_broken(text: str, message: str) -> None:
    with pytest.raises(
        ValueError, match=r"text must be a plan as ShardingPlan.to_json.. writes"
    ) as e:
        ShardingPlan.from_json(text)
    assert message in str(e.value)


def optimizers_before() -> list[str]:
    """The error of each optimizer that is made too early; a dropped one has none."""
    mesh, messages = init_device_mesh("cpu", (2,)), []
    for make in (torchembed.optim.Adagrad, torch.optim.SGD):
        model = make_model(Case(placements={}))
        model.top = nn.Linear(2, 1)
        optimizer = make([model.tables.embedding_bags["b"].weight], lr=0.125)
        dense = torch.optim.SGD(model.top.parameters())
        with pytest.raises(ValueError, match="optimizer") as error:
            torchembed.shard_embeddings(model, mesh)
        messages.append(str(error.value))
        del optimizer
        torchembed.shard_embeddings(model, mesh)
        check = torchembed.optim.SGD(list(model.tables.parameters()), lr=0.125)
        TrainPipeline(model, None, [check, dense])
    return messages


def test_an_optimizer_that_was_made_before() -> None:
    for fused, of_torch in run_on_ranks(2, optimizers_before):
        for name, message in (("Adagrad", fused), ("SGD", of_torch)):
            start = f"optimizer {name} was made before shard_embeddings, and would never change the"
            assert message.startswith(f"{start} tables tables.embedding_bags.b, whose")


def one_table(path: str) -> list[float]:
    """A step of a table that one of two ranks holds, by the same lines on both."""
    case = Case(placements={"a": "table_wise", "b": "row_wise", "c": "row_wise", "d": "row_wise"})
    model = make_model(case, "meta")
    configs = model.tables.embedding_bag_configs()[:1]
    model.tables = torchembed.EmbeddingBagCollection(configs, device="meta")
    mesh = init_device_mesh("cpu", (2,))
    torchembed.shard_embeddings(model, mesh, {"tables.embedding_bags.a": "table_wise"})
    losses = []
    optimizer = torchembed.optim.Adagrad(model.tables.parameters(), lr=0.125)
    run = TrainingRun(model=model, optimizers=[optimizer])
    for _ in range(2):
        optimizer.zero_grad()
        loss = exact_loss(vectors_of(model.tables(make_batch(case, dist.get_rank(), 0))))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.load_state_dict(run.optimizers[0].state_dict())
    joined = TrainingRun(
        model=model, optimizers=[torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.125)]
    )
    folder = CheckpointFolder(path)
    folder.save(1, joined)
    assert folder.load(joined) == 1
    return [*losses, len(list(model.parameters()))]


def test_a_rank_without_a_table_has_an_optimizer_without_parameters(tmp_path: Any) -> None:
    first, second = run_on_ranks(2, one_table, str(tmp_path))
    assert first[0] != first[1] and second[0] != second[1]
    assert sorted((first[2], second[2])) == [0, 1]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = make_model(Case(placements={})).tables
        self.top = nn.Linear(2, 1)


def test_a_pipeline_whose_optimizers_lack_parameters() -> None:
    model = Plain()
    tables = torchembed.optim.SGD(model.tables.parameters(), lr=0.125)
    with pytest.raises(ValueError, match=re.escape("none has top.weight, top.bias; give them")):
        TrainPipeline(model, None, [tables])
    dense = torch.optim.SGD(model.top.parameters())
    with pytest.raises(ValueError, match=r"but none has tables.embedding_bags.a.weight, .* 1 more"):
        TrainPipeline(model, None, [dense])
    TrainPipeline(model, None, [tables, dense])
    model.top.requires_grad_(False)
    TrainPipeline(model, None, [tables])


def test_a_pipeline_whose_optimizers_have_others_parameters() -> None:
    model, other = Plain(), Plain()
    mine = torch.optim.SGD(model.parameters())
    theirs = torch.optim.Adam(other.top.parameters())
    message = "one of Adam's, of shape .1, 2., one of Adam's, of shape .1,. is not in it; make"
    with pytest.raises(ValueError, match=message):
        TrainPipeline(model, None, [mine, theirs])
