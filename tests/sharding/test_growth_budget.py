"""The memory of dynamic tables while they grow: in budgets, in plans, and as it is allocated."""

import dataclasses

import pytest
import torch
from torch.profiler import profile

import torchembed
from tests.support.planning import make_topology, make_use
from torchembed import LFU, Dynamic, EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from torchembed.modules import table_uses
from torchembed.ops.hash_table import growth
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding import Planner, TableUse, make_plan
from torchembed.sharding.planning.memory_budget import MemoryBudget, memory_budget
from torchembed.tables import HashedRows, HashFactory, HashIndex, grow_to
from torchembed.tables.dynamic.group_growth import GrownGroup

GROWS = Dynamic(initial_capacity=4096)
ADAGRAD = UpdateRule(kind=torchembed.optim.Adagrad.kind)
LINE = 16 * 4 + 16 * 4 + 17
"""Bytes of a row of 16 columns with Adagrad's state and what LRU keeps of it."""


def growing(
    capacity: int, dim: int = 16, *, dynamic: Dynamic = GROWS, module: str = "bags"
) -> TableUse:
    factory = HashFactory(dynamic)
    use = make_use(factory.rows_for(capacity), dim, "f")
    spec = dataclasses.replace(use.spec, index=factory)
    return dataclasses.replace(use, spec=spec, module=module)


def budget_of(
    tables: dict[str, TableUse],
    placement: str = "table_wise",
    *,
    num_ranks: int = 1,
    rule: UpdateRule | None = ADAGRAD,
) -> MemoryBudget:
    specs = {name: use.spec for name, use in tables.items()}
    plan = make_plan(specs, num_ranks, dict.fromkeys(tables, placement))
    return memory_budget(plan, tables, 0, report=None, rule=rule, dense_bytes=0, free_bytes=2**40)


def test_a_lone_table_needs_its_half_beside_the_whole() -> None:
    budget = budget_of({"t": growing(8 * 4096)})
    assert budget.growth_bytes == 4 * 4096 * (LINE + 8)
    assert budget.needed_bytes == 8 * 4096 * LINE + 4 * 4096 * (LINE + 8)
    assert ", 2.391 MiB for rows of dynamic tables that move as they grow" in str(budget)
    less = budget_of({"t": growing(8 * 4096)}, rule=None)
    assert less.growth_bytes == 4 * 4096 * (16 * 4 + 17 + 8)


def test_16_bit_rows_take_keys_of_their_rounding() -> None:
    use = growing(8 * 4096)
    use = dataclasses.replace(use, spec=dataclasses.replace(use.spec, dtype=torch.bfloat16))
    budget = budget_of({"t": use})
    assert budget.index_bytes == 8 * 4096 * (17 + 16)
    assert budget.growth_bytes == 4 * 4096 * (LINE - 2 * 16 + 16 + 8)


def test_tables_that_have_all_rows_never_grow() -> None:
    for dynamic in (Dynamic(), Dynamic(initial_capacity=8 * 4096)):
        budget = budget_of({"t": growing(8 * 4096, dynamic=dynamic)})
        assert budget.growth_bytes == 0
        assert "grow" not in str(budget)


def test_rows_that_ids_share_move_too_and_are_not_doubled() -> None:
    shared = Dynamic(initial_capacity=4096, missing=HashedRows(100), eviction=LFU())
    budget = budget_of({"t": growing(8 * 4096, dynamic=shared)})
    assert budget.growth_bytes == (4 * 4096 + 100) * (LINE + 8 + 8)


def test_tables_of_a_group_are_moved_together() -> None:
    """The most is there when the smaller one grows last; a table that starts whole moves too."""
    tables = {"a": growing(8 * 4096), "b": growing(2 * 4096), "whole": growing(1000)}
    rows_of_whole = tables["whole"].spec.num_rows
    rows = 8 * 4096 + 4096 + rows_of_whole
    assert budget_of(tables).growth_bytes == rows * (LINE + 8)


def test_groups_of_a_module_grow_at_once_and_modules_after_each_other() -> None:
    wide = growing(8 * 4096, 32)
    wide_bytes = 4 * 4096 * (32 * 8 + 17 + 8)
    narrow_bytes = 4 * 4096 * (LINE + 8)
    at_once = {"a": growing(8 * 4096), "b": wide}
    assert budget_of(at_once).growth_bytes == narrow_bytes + wide_bytes
    apart = {"a": growing(8 * 4096), "b": dataclasses.replace(wide, module="others")}
    assert budget_of(apart).growth_bytes == wide_bytes


def test_parts_of_a_table_grow_on_their_ranks() -> None:
    tables = {"t": growing(8 * 4096, dynamic=Dynamic(initial_capacity=2 * 4096))}
    assert budget_of(tables, "row_wise", num_ranks=2).growth_bytes == 2 * 4096 * (LINE + 8)
    assert budget_of(tables, "column_wise", num_ranks=2).growth_bytes == 4 * 4096 * (8 * 8 + 17 + 8)


def test_a_planner_leaves_room_for_growth() -> None:
    """Two tables that would fit one rank at their capacity are put on two, and one is refused
    where its rows do not fit twice."""
    tables = {"a": growing(8 * 4096), "b": growing(8 * 4096)}
    planner = Planner(batch_size=1, placements=("table_wise",))
    whole, half = 8 * 4096 * LINE, 4 * 4096 * (LINE + 8)
    buffers = 2**12
    report = planner.plan(tables, make_topology(1, 2, whole + half + buffers))
    assert sorted(table.shards[0].rank for table in report.plan.tables) == [0, 1]
    for rank in report.ranks:
        assert rank.growth_bytes == half
        assert rank.held_bytes == whole + half + rank.buffer_bytes
        budget = memory_budget(
            report.plan, tables, rank.rank, report=report, dense_bytes=0, free_bytes=2**40
        )
        assert budget.growth_bytes == half and budget.needed_bytes == rank.held_bytes
    head, line = str(report).splitlines()[6:8]
    assert head.split()[:6] == ["rank", "rows", "and", "state", "growth", "buffers"]
    assert line.split()[:5] == ["0", "4.531", "MiB", "2.391", "MiB"]
    with pytest.raises(
        ValueError,
        match=r"rank \d would need .* for activations and exchange buffers and 2\.391 MiB for rows "
        r"that move as tables grow, and has",
    ):
        planner.plan(tables, make_topology(1, 2, whole + half))


def test_the_memory_that_growth_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Just before the smaller of two tables grows for the last time and until all rows have moved,
    the allocator has given the bytes of the budget, but for the pieces in which rows move."""
    piece_bytes = 2**14
    monkeypatch.setattr(growth, "_PIECE_BYTES", piece_bytes)
    dynamic = Dynamic(initial_capacity=4096)
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=capacity,
            embedding_dim=16,
            feature_names=(name,),
            dynamic=dynamic,
        )
        for name, capacity in {"a": 8 * 4096, "b": 4 * 4096}.items()
    ]
    module = EmbeddingBagCollection(configs)
    optimizer = torchembed.optim.Adagrad(module.parameters(), lr=0.1)
    budget = budget_of(table_uses(torch.nn.ModuleDict({"bags": module})))
    ids = SparseFeatures.from_dict({name: [list(range(2000))] for name in "ab"})
    module(ids).values().sum().backward()
    optimizer.step()
    a, b = module.table_set.tables
    grow_to(a, 8 * 4096)
    grow_to(b, 2 * 4096)
    group = a.group
    assert isinstance(group.index, HashIndex)
    contents = [t for number in range(2) for t in group.index.contents(number).values()]
    held = [group.weight, *group.states, *(t for t in contents if len(t) >= 4096)]
    num_bytes = sum(tensor.nbytes for tensor in held)
    assert num_bytes == (8 + 2) * 4096 * LINE
    with profile(profile_memory=True) as profiled:
        GrownGroup(group, [8 * 4096, 4 * 4096])
    most = num_bytes
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            num_bytes += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            most = max(most, num_bytes)
    assert 0 <= most - budget.needed_bytes < 4 * piece_bytes
