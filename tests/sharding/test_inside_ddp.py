"""torch's ``DistributedDataParallel`` around models with our tables, sharded and not."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import Case, make_batch, make_model

PLACEMENTS = {"a": "table_wise", "b": "row_wise", "c": "column_wise", "d": "data_parallel"}
NUM_STEPS = 4


class Model(nn.Module):
    """Pooled vectors and a layer on top, whose weights are small integers."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        super().__init__()
        self.tables = make_model(case, device).tables
        width = 8 + 8 + 8 + 5 + 8
        self.top = nn.Linear(width, 1)
        with torch.no_grad():
            self.top.weight.copy_(torch.arange(width).remainder(5).sub(2).view(1, -1))
            self.top.bias.zero_()

    def forward(self, batch: torchembed.SparseFeatures) -> Tensor:
        return self.top(self.tables(batch).values()).sum()


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: torchembed.SparseFeatures) -> Tensor:
        return self.model(batch)


CASES = [
    Case(placements=PLACEMENTS),
    Case(placements=dict.fromkeys("abcd", "row_wise")),
    Case(placements=PLACEMENTS, fused=False, optimizer="SGD"),
]


def trained(case: Case, settings: dict[str, Any] | None, outer: bool, flat: bool) -> dict[str, Any]:
    """Rows and dense weights after some steps, within ``DistributedDataParallel`` or without."""
    model = Model(case, "meta" if case.fused else "cpu")
    whole: nn.Module = Wrapper(model) if outer else model
    if case.fused:
        model.top = Model(case).top
    prefix = "model." if outer else ""
    placements = {prefix + name: value for name, value in case.table_placements().items()}
    torchembed.shard_embeddings(whole, init_device_mesh("cpu", (2,)), placements)
    tables = list(model.tables.parameters())
    optimizers: list[Any] = [
        torchembed.optim.Adagrad([{"params": tables}], lr=0.125)
        if case.fused
        else torch.optim.SGD(tables, lr=0.125),
        torchembed.optim.DenseAdam(model.top.parameters(), lr=0.25)
        if flat
        else torch.optim.SGD(model.top.parameters(), lr=0.25),
    ]
    called = whole if settings is None else DistributedDataParallel(whole, **settings)
    for step in range(NUM_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        called(make_batch(case, dist.get_rank(), step)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def runs() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each case without and with ``DistributedDataParallel``."""
    found = []
    for case in CASES:
        for settings, outer, flat in (
            ({}, False, False),
            ({"gradient_as_bucket_view": True}, True, False),
            ({"find_unused_parameters": True}, True, True),
            ({"broadcast_buffers": False}, False, True),
        ):
            plain = trained(case, None, outer, flat)
            found.append((plain, trained(case, settings, outer, flat)))
    return found


def test_ddp_around_a_sharded_model_changes_nothing() -> None:
    # Divisors are powers of two, so that both means have the same bits.
    for of_rank in run_on_ranks(2, runs):
        for plain, within in of_rank:
            assert plain.keys() == within.keys()
            for name, expected in plain.items():
                np.testing.assert_array_equal(within[name], expected, err_msg=name)


def around_too_much() -> str:
    # As many rows on each rank, or torch finds shapes that differ.
    placements = {"tables.embedding_bags.b": "row_wise"}
    others = {f"tables.embedding_bags.{name}": "data_parallel" for name in "acd"}
    model = Model(CASES[1])
    mesh = init_device_mesh("cpu", (2,))
    torchembed.shard_embeddings(model, mesh, placements | others)
    ddp = DistributedDataParallel(Wrapper(model))
    with pytest.raises(RuntimeError) as error:
        ddp(make_batch(CASES[1], dist.get_rank(), 0))
    return str(error.value)


def of_unsharded_tables() -> list[str]:
    messages = []
    bag = nn.Sequential(torchembed.EmbeddingBag(9, 4, mode="sum"), nn.Linear(4, 1))
    for model, tables, batch in (
        (Model(CASES[0]), "tables", make_batch(CASES[0], dist.get_rank(), 0)),
        (bag, "0", torch.tensor([[1, 2], [3, 4]])),
    ):
        torchembed.optim.SGD(model.get_submodule(tables).parameters(), lr=0.125)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        with pytest.raises(RuntimeError) as error:
            ddp(batch)
        messages.append(str(error.value))
        with torch.no_grad():
            ddp(batch)
    return [*messages, around_a_dynamic_table()]


def around_a_dynamic_table() -> str:
    """The error of a forward of a dynamic table that is whole on each rank, trained by torch."""
    bag = torchembed.EmbeddingBag(9, 4, mode="sum", dynamic=torchembed.Dynamic())
    ddp = DistributedDataParallel(bag)
    ids = torch.tensor([[1, 2 + dist.get_rank()]])
    bag(ids)  # by itself, without its wrapper
    with torch.no_grad():
        ddp(ids)
    with pytest.raises(RuntimeError) as error:
        ddp(ids)
    return str(error.value)


def test_ddp_around_more_than_was_sharded_is_refused() -> None:
    for message in run_on_ranks(2, around_too_much):
        assert message.startswith("DistributedDataParallel takes tables a, b, c, d for dense")


def test_ddp_of_unsharded_tables_that_are_fused_or_dynamic_is_refused() -> None:
    for collection, bag, dynamic in run_on_ranks(2, of_unsharded_tables):
        assert collection.startswith("tables a, d have a fused optimizer, whose gradients Dist")
        assert bag.startswith("tables weight have a fused optimizer")
        assert dynamic.startswith("dynamic tables weight must be sharded to be trained on several")
