"""``shard_embeddings``: what it leaves in a model, what it refuses, and how state moves."""

import copy
import dataclasses
import functools
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import Case, make_batch, make_model, vectors_of
from torchembed import HostMemory
from torchembed.core.features import SparseFeatures
from torchembed.modules.sharded.model_plan import table_specs
from torchembed.sharding import ShardingPlan, WirePrecision, make_plan

MIXED = Case(
    placements={"a": "table_wise", "b": "row_wise", "c": "column_wise", "d": "data_parallel"}
)


CONFIG = torchembed.EmbeddingBagConfig(
    name="t", num_embeddings=8, embedding_dim=4, feature_names=("f",)
)


class Doubled(torchembed.EmbeddingBagCollection):
    """A collection with code of its own."""

    def forward(self, features: Any) -> Any:
        return 2 * super().forward(features).values()


def one_table(num_rows: int, dim: int) -> nn.Module:
    model = nn.Module()
    config = torchembed.EmbeddingBagConfig(
        name="t", num_embeddings=num_rows, embedding_dim=dim, feature_names=("f",)
    )
    model.tables = torchembed.EmbeddingBagCollection([config], device="meta")
    return model


def in_host(name: str, model: nn.Module) -> ShardingPlan:
    """A plan that places table ``name`` in host memory."""
    plan = make_plan(table_specs(model), 2)
    storage = HostMemory(cache_rows=7)
    tables = [
        dataclasses.replace(table, storage=storage) if table.table == name else table
        for table in plan.tables
    ]
    return dataclasses.replace(plan, tables=tuple(tables))


def refusals() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,))
    plan = make_plan(table_specs(make_model(MIXED, "meta")), 2)
    wrong_ranks = make_plan(table_specs(make_model(MIXED, "meta")), 4)
    fewer = ShardingPlan(num_ranks=2, tables=plan.tables[1:])
    larger = table_specs(make_model(MIXED, "meta"))
    first = "tables.embedding_bags.a"
    larger[first] = dataclasses.replace(larger[first], num_rows=24)
    uneven = make_plan(larger, 2)
    on_meta = make_model(MIXED, "meta")
    on_meta.top = nn.Linear(2, 2, device="meta")
    of_complex = make_model(MIXED, "meta")
    of_complex.phases = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    too_large, wide = one_table(1 << 40, 128), one_table(1 << 20, 1 << 18)
    one_process = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("mesh", "node", "rank"))
    stored_model = make_model(dataclasses.replace(MIXED, stored=("a",)), "meta")
    sharded = torchembed.shard_embeddings(make_model(MIXED), mesh)
    attempts: dict[str, tuple[Any, ...]] = {
        "three dimensions": (make_model(MIXED), init_device_mesh("cpu", (1, 1, 2))),
        "other nodes": (make_model(MIXED), init_device_mesh("cpu", (2, 1)), plan),
        "order": (make_model(MIXED), DeviceMesh("cpu", [1, 0])),
        "some processes": (make_model(MIXED), one_process["node", "rank"]),
        "another split": (make_model(MIXED), mesh, uneven),
        "a collection": (make_model(MIXED).tables, mesh),
        "a derived class": (nn.ModuleDict({"mine": Doubled([CONFIG])}), mesh),
        "twice": (sharded, mesh),
        "fewer tables": (make_model(MIXED), mesh, fewer),
        "other ranks": (make_model(MIXED), mesh, wrong_ranks),
        "meta": (on_meta, mesh),
        "complex": (of_complex, mesh),
        "another storage": (stored_model, mesh, in_host("tables.embedding_bags.a", stored_model)),
        "host": (wide, mesh, in_host("tables.embedding_bags.t", wide)),
        "memory": (too_large, mesh, {"tables.embedding_bags.t": "table_wise"}),
    }
    messages = {}
    for name, arguments in attempts.items():
        try:
            torchembed.shard_embeddings(*arguments)
        except ValueError as error:
            messages[name] = str(error)
    try:
        copy.deepcopy(sharded)
    except TypeError as error:
        messages["a copy"] = str(error)
    return messages


def disagreements() -> dict[str, str]:
    """The error on each rank where rank 1 does something else than rank 0."""
    is_second = dist.get_rank() == 1
    mesh = init_device_mesh("cpu", (2,))
    others = {
        "placement": {"plan": {"tables.embedding_bags.d": "row_wise"}},
        "refused": {"plan": {"tables.embedding_bags.e": "row_wise"}},
        "no plan": {"plan": 5},
        "another error": {"wire": torch.float16},
        "optimizer": {"optimizer": torch.optim.Adam},
        "wire": {"wire": WirePrecision(backward=torch.float16)},
        "setting": {"case": Case(placements={}, on_bad_id="zero")},
        "tables": {"case": Case(placements={}, dtype=torch.float16)},
        "dense": {"width": 3},
        "meta": {"device": "meta"},
        "buffer": {"buffer": torch.zeros(3)},
        "buffer's dtype": {"buffer": torch.zeros(2, dtype=torch.float64)},
        "nothing": {},
    }
    messages = {}
    for name, other in others.items():
        different = other if is_second else {}
        model = make_model(
            different.get("case", Case(placements={})), different.get("device", "cpu")
        )
        model.register_buffer("scale", different.get("buffer", torch.zeros(2)))
        model.top = nn.Linear(different.get("width", 2), 1)
        try:
            torchembed.shard_embeddings(
                model,
                mesh,
                different.get("plan"),
                wire=different.get("wire"),
                optimizer=different.get("optimizer"),
            )
        except ValueError as error:
            messages[name] = str(error)
            assert isinstance(model.tables, torchembed.EmbeddingBagCollection)
    torchembed.shard_embeddings(_with_functions(), mesh)
    return messages


def _with_functions() -> nn.Module:
    """A model whose description would show addresses, which differ from process to process."""
    config = torchembed.EmbeddingBagConfig(
        name="t",
        num_embeddings=3,
        embedding_dim=4,
        feature_names=("f",),
        initializer=torchembed.InPlaceFunction(functools.partial(nn.init.constant_, val=2.0)),
    )
    return nn.ModuleDict({"tables": torchembed.EmbeddingBagCollection([config])})


def state_moves() -> dict[str, Any]:
    """Unsharded to sharded, by copying at creation, by loading, and back out as DTensors."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    source = make_model(MIXED)
    with torch.no_grad():
        for number, parameter in enumerate(source.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + number)
    whole = source.state_dict()
    batch = make_batch(MIXED, rank, 0)
    expected = vectors_of(source.tables(batch)).detach()

    copied = torchembed.shard_embeddings(make_model(MIXED).requires_grad_(), mesh, None)
    copied.load_state_dict(whole)
    created = make_model(MIXED)
    created.load_state_dict(whole)
    created.tables.embedding_bags["d"].weight.requires_grad_(False)
    torchembed.shard_embeddings(created, mesh, MIXED.table_placements())
    reloaded = torchembed.shard_embeddings(
        make_model(MIXED, "meta"), mesh, MIXED.table_placements()
    )
    reloaded.load_state_dict(created.state_dict())
    state = created.state_dict()
    otherwise = make_model(MIXED, "meta")
    placements = MIXED.table_placements() | {"tables.embedding_bags.c": "row_wise"}
    torchembed.shard_embeddings(otherwise, mesh, placements)
    with pytest.raises(ValueError, match="weight of table c must be placed as in this model"):
        otherwise.load_state_dict(state)
    reloaded.to_empty(device="cpu")
    reloaded.load_state_dict(state)
    return {
        "equal": [
            torch.equal(vectors_of(model.tables(batch)), expected)
            for model in (copied, created, reloaded)
        ],
        "frozen": [n for n, p in created.named_parameters() if not p.requires_grad],
        "kinds": {name: type(tensor).__name__ for name, tensor in state.items()},
        "full": {
            name: tensor.full_tensor().numpy()
            for name, tensor in state.items()
            if isinstance(tensor, DTensor)
        },
    }


def fewer_rows_than_ranks() -> tuple[int, ...]:
    """Of three processes the mesh has two, which share a table of one row."""
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() > 1:
        return ()
    model = nn.Module()
    config = torchembed.EmbeddingBagConfig(
        name="t", num_embeddings=1, embedding_dim=4, feature_names=("f",)
    )
    model.tables = torchembed.EmbeddingBagCollection([config])
    whole = model.state_dict()
    name = "tables.embedding_bags.t"
    torchembed.shard_embeddings(model, mesh, {name: "row_wise"})
    model.load_state_dict(whole)
    state = model.state_dict()
    return tuple(state[f"{name}.weight"].shape) if state else ()


def rows_of_a_smaller_table() -> dict[str, str]:
    """The errors for rows of the shape of this rank's part, and for any other shape."""
    model = nn.ModuleDict({"bags": torchembed.EmbeddingBagCollection([CONFIG])})
    model["one"] = torchembed.EmbeddingBag(8, 4)
    whole = model.state_dict()
    torchembed.shard_embeddings(
        model, init_device_mesh("cpu", (2,)), dict.fromkeys(table_specs(model), "row_wise")
    )
    messages = {}
    for name in whole:
        for num_rows in (4, 5):
            with pytest.raises((ValueError, RuntimeError)) as error:
                model.load_state_dict(whole | {name: torch.zeros(num_rows, 4)})
            messages[f"{name} of {num_rows} rows"] = str(error.value)
    return messages


def test_rows_of_a_smaller_table_are_not_taken_for_parts() -> None:
    of_part = (
        r"weight of table (t|weight) must be whole, of shape \[8, 4\], or a DTensor as in this "
        r"model, got a tensor of shape \[4, 4\], as a rank's part has; copy parts into"
    )
    for messages in run_on_ranks(2, rows_of_a_smaller_table):
        assert len(messages) == 4
        for name, message in messages.items():
            pattern = of_part if name.endswith("4 rows") else "size mismatch for"
            assert re.search(pattern, message), name


def dense_training(order: list[int]) -> list[float]:
    """Loss of a model with a dense part; ``order`` permutes samples, which reorders sums."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(rank)  # different initial values, which sharding makes those of rank 0
    model = make_model(MIXED, "meta" if num_ranks > 1 else "cpu")
    model.top = nn.Sequential(nn.Linear(37, 16), nn.Tanh(), nn.Linear(16, 1))
    if num_ranks > 1:
        mesh = init_device_mesh("cpu", (num_ranks,))
        torchembed.shard_embeddings(model, mesh, MIXED.table_placements())
    fused = torchembed.optim.Adagrad(model.tables.parameters(), lr=0.05)
    dense = torch.optim.Adagrad(model.top.parameters(), lr=0.05)
    ranks = [rank] if num_ranks > 1 else order
    losses = []
    for step in range(5):
        dense.zero_grad()
        total = torch.zeros(())
        for number in ranks:
            batch = make_batch(MIXED, number, step)
            out = model.top(model.tables(batch).values()).squeeze(1)
            target = torch.arange(len(out)) % 2
            total = total + ((out - target) ** 2).sum() / max(len(out), 1)
        (total / len(ranks)).backward()
        fused.step()
        dense.step()
        losses.append(float(total.detach()) / (1 if num_ranks > 1 else len(order)))
    return losses


def test_refusals() -> None:
    for messages in run_on_ranks(2, refusals):
        patterns = {
            "three dimensions": "mesh must have one dimension, or two (nodes, ranks in a node)",
            "other nodes": "plan is for 1 nodes, but mesh has 2; a mesh of several has two",
            "some processes": "mesh must hold all 2 processes where it has two dimensions or some",
            "order": "mesh must hold its ranks in increasing order, got [1, 0]",
            "another split": "tables.embedding_bags.a must divide 23 rows of 8 columns as place",
            "a collection": "model must contain modules with tables, got an EmbeddingBagColl",
            "a derived class": "module 'mine' must be an EmbeddingBagCollection itself to be "
            "sharded, got a Doubled, which is derived from it and whose own code would be lost",
            "twice": "model must not be sharded yet, but its tables is a ShardedEmbeddingBagC",
            "a copy": "ShardedEmbeddingBagCollection cannot be copied, since it exchanges with",
            "fewer tables": "plan must hold the tables",
            "other ranks": "plan is for 4 ranks, but mesh has 2",
            "meta": "parameters ['top.weight', 'top.bias'] are on the meta device",
            "complex": "parameter phases must be real to be trained on several ranks, got "
            "torch.complex64; hold torch.view_as_real of it in a parameter, and call",
            "another storage": "plan's storage of table tables.embedding_bags.a must be "
            "HostMemory(cache_rows=48, cache_bytes=None), as the model says, got HostMemory(",
            "host": "tables do not fit: ranks 0-1 will take 1 TiB of the ",
            "memory": "tables do not fit: rank 0 will take 512 TiB of",
        }
        assert messages.keys() == patterns.keys()
        for name, pattern in patterns.items():
            assert re.search(re.escape(pattern), messages[name])


def test_ranks_that_disagree_are_told_in_what() -> None:
    first, second = run_on_ranks(2, disagreements)
    assert first == second
    patterns = {
        "placement": "ranks must agree on what is sharded, and how: rank 0 has "
        "tables.embedding_bags.d: table_wise on ranks 1, rank 1 has "
        "tables.embedding_bags.d: row_wise on ranks 0, 1; start every rank with",
        "refused": r"rank 1 has the error: ValueError: plan places tables .*embedding_bags.e",
        "no plan": r"rank 1 has the error: ValueError: plan must be .*, got 5",
        "another error": "rank 1 has the error: TypeError: wire must be a WirePrecision, as .* got",
        "optimizer": "rank 1 has the error: TypeError: optimizer must be the class of an optimizer "
        "of tables, as torchembed.optim.Adagrad, got <class 'torch.optim.adam.Adam'>",
        "wire": r"rank 0 has WirePrecision\(.*backward=None, .*\), rank 1 .*torch.float16, .*\);",
        "setting": r"rank 0 has tables: .*on_bad_id=RAISE.*, rank 1 has tables: .*ZERO",
        "tables": r"EmbeddingBagConfig\(name='a'.*torch.float32.*name='a'.*torch.float16",
        "dense": r"rank 0 has top.weight: \(1, 2\).*, rank 1 has top.weight: \(1, 3\)",
        "meta": r"rank 0 has tables: .*on_meta=False, rank 1 has tables: .*on_meta=True",
        "buffer": r"rank 0 has scale: a buffer of \(2,\).*, rank 1 has scale: a buffer of \(3,\)",
        "buffer's dtype": r"\(2,\), torch.float32, rank 1 has scale: .* \(2,\), torch.float64",
    }
    assert first.keys() == patterns.keys()
    for name, pattern in patterns.items():
        assert re.search(pattern, first[name]), first[name]


def test_state_moves_between_unsharded_and_sharded() -> None:
    results = run_on_ranks(2, state_moves)
    for result in results:
        assert result["equal"] == [True, True, True]
        assert result["frozen"] == ["tables.embedding_bags.d.weight"]
        kinds = result["kinds"]
        assert kinds["tables.embedding_bags.b.weight"] == "DTensor"
        assert kinds["tables.embedding_bags.d.weight"] == "Tensor"
        whole = result["full"]["tables.embedding_bags.c.weight"]
        np.testing.assert_array_equal(whole, np.arange(250.0).reshape(50, 5) + 2)
    owners = ["tables.embedding_bags.a.weight" in result["kinds"] for result in results]
    assert sorted(owners) == [False, True]


def mode_and_hooks() -> dict[str, Any]:
    """By kind of module: if it and its children train, and the hooks that its forward called."""
    mesh = init_device_mesh("cpu", (2,))
    found, called = {}, []
    sparse = SparseFeatures(keys=("f",), values=torch.arange(4), batch_size=4, hotness=(1,))
    sequences = torchembed.EmbeddingConfig(
        name="t", num_embeddings=8, embedding_dim=4, feature_names=("f",)
    )
    for table, features in (
        (torchembed.EmbeddingBagCollection([CONFIG]), sparse),
        (torchembed.EmbeddingCollection([sequences]), sparse),
        (torchembed.EmbeddingBag(8, 4), torch.arange(4).view(4, 1)),
    ):
        table.register_forward_hook(lambda module, *_: called.append(type(module).__name__))
        table.register_forward_pre_hook(lambda *_: called.append("before"))
        model = nn.ModuleDict({"table": table}).eval()
        torchembed.shard_embeddings(model, mesh, dict.fromkeys(table_specs(model), "row_wise"))
        model["table"](features)
        found[type(model["table"]).__name__] = [module.training for module in model.modules()]
    return {"training": found, "called": called}


def test_sharded_modules_keep_mode_and_hooks() -> None:
    for result in run_on_ranks(2, mode_and_hooks):
        kinds = ["ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection"]
        kinds.append("ShardedEmbeddingBag")
        assert list(result["training"]) == kinds
        assert not any(any(modes) for modes in result["training"].values())
        assert result["called"] == [name for kind in kinds for name in ("before", kind)]


def test_some_processes_share_a_table_of_fewer_rows() -> None:
    assert run_on_ranks(3, fewer_rows_than_ranks) == [(1, 4), (), ()]


def test_losses_with_a_dense_part_equal_up_to_the_order_of_sums() -> None:
    sharded = np.mean(run_on_ranks(2, dense_training, [0, 1]), axis=0)
    unsharded = np.array(dense_training([0, 1]))
    reordered = np.array(dense_training([1, 0]))
    drift = np.abs(unsharded - reordered).max() + np.finfo(np.float32).eps * unsharded.max()
    np.testing.assert_allclose(sharded, unsharded, rtol=0, atol=4 * drift)
    assert unsharded[-1] < unsharded[0]


def test_clipping_by_the_joint_norm_refuses_sharded_tables() -> None:
    for message in run_on_ranks(2, clip_sharded):
        assert re.search(
            "table b is sharded, and the norm of its gradient spans the ranks", message
        )


def clip_sharded() -> str:
    model = make_model(Case(placements={}), "meta")
    mesh = init_device_mesh("cpu", (2,))
    placements = dict.fromkeys(table_specs(model), "row_wise")
    torchembed.shard_embeddings(model, mesh, placements)
    with pytest.raises(RuntimeError) as error:
        torchembed.optim.clip_grad_norm_([model.tables.embedding_bags["b"].weight], 1.0)
    return str(error.value)
