"""Plans: made, kept as JSON, printed, refused."""

import dataclasses
import json
import re

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from torchembed import Dynamic
from torchembed.sharding import Placement, Shard, ShardingPlan, TablePlan, make_plan
from torchembed.sharding.planning.plan import place_table
from torchembed.tables import HashFactory, TableSpec

specs_strategy = st.dictionaries(
    st.text("abcdef.", min_size=1, max_size=8),
    st.builds(
        TableSpec,
        name=st.just("t"),
        num_rows=st.integers(1, 10**9),
        dim=st.sampled_from((4, 128)),
        dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    ),
    max_size=12,
)


def num_bytes(spec: TableSpec) -> int:
    return spec.num_rows * spec.dim * spec.dtype.itemsize


@hypothesis.given(
    specs=specs_strategy,
    num_nodes=st.integers(1, 3),
    ranks_per_node=st.integers(1, 5),
    data=st.data(),
)
def test_every_element_is_placed_once_and_json_round_trips(
    specs: dict[str, TableSpec], num_nodes: int, ranks_per_node: int, data: st.DataObject
) -> None:
    wished = data.draw(
        st.dictionaries(st.sampled_from(list(specs)), st.sampled_from(Placement))
        if specs
        else st.just({})
    )
    num_ranks = num_nodes * ranks_per_node
    plan = make_plan(specs, num_ranks, wished, num_nodes=num_nodes)
    assert plan.ranks_per_node == ranks_per_node
    assert [table.table for table in plan.tables] == list(specs)
    for table in plan.tables:
        num_rows, dim = specs[table.table].num_rows, specs[table.table].dim
        if table.table in wished:
            assert table.placement is wished[table.table]
        if table.placement is Placement.DATA_PARALLEL:
            assert [shard.rank for shard in table.shards] == list(range(num_ranks))
            assert {extent(shard) for shard in table.shards} == {(0, num_rows, 0, dim)}
            continue
        assert len({shard.rank for shard in table.shards}) == len(table.shards)
        next_row = next_column = 0
        for shard in table.shards:
            assert shard.num_rows > 0
            assert shard.num_columns > 0
            if table.placement is Placement.COLUMN_WISE:
                assert extent(shard) == (0, num_rows, next_column, shard.num_columns)
                next_column += shard.num_columns
            else:
                assert extent(shard) == (next_row, shard.num_rows, 0, dim)
                next_row += shard.num_rows
        assert (next_row, next_column) in ((num_rows, 0), (0, dim))
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert ShardingPlan.from_json(plan.to_json()).to_json() == plan.to_json()


def extent(shard: Shard) -> tuple[int, int, int, int]:
    return shard.first_row, shard.num_rows, shard.first_column, shard.num_columns


@hypothesis.given(specs=specs_strategy, num_ranks=st.integers(1, 9))
def test_default_plan_bounds_the_fullest_rank(specs: dict[str, TableSpec], num_ranks: int) -> None:
    """Row-wise tables add their share to every rank; a greedy table-wise one overshoots by one."""
    plan = make_plan(specs, num_ranks)
    held = [0] * num_ranks
    largest, rounding = 0, 0
    for table in plan.tables:
        spec = specs[table.table]
        for shard in table.shards:
            held[shard.rank] += shard.num_rows * spec.dim * spec.dtype.itemsize
        if table.placement is Placement.TABLE_WISE:
            largest = max(largest, num_bytes(spec))
        else:
            rounding += num_ranks * spec.dim * spec.dtype.itemsize
    share = sum(map(num_bytes, specs.values())) / num_ranks
    assert max(held) <= share + largest + rounding
    if num_ranks > 1:
        assert largest <= share


DYNAMIC = HashFactory(Dynamic())


@hypothesis.given(capacity=st.integers(1, 10**9), num_ranks=st.integers(1, 9))
def test_each_rank_holds_a_share_of_a_dynamic_table(capacity: int, num_ranks: int) -> None:
    """Equal shares of at least the capacity, which are as large as a table of that many rows is."""
    spec = TableSpec(name="t", num_rows=DYNAMIC.rows_for(capacity), dim=4, index=DYNAMIC)
    plan = make_plan({"t": spec}, num_ranks, {"t": Placement.ROW_WISE})
    shards = plan.table("t").shards
    (num_rows,) = {shard.num_rows for shard in shards}
    assert num_rows == DYNAMIC.rows_for(-(-spec.num_rows // num_ranks))
    assert num_rows * num_ranks >= capacity
    assert [shard.first_row for shard in shards] == [w * num_rows for w in range(num_ranks)]
    assert plan.table("t").takes_any_id
    assert ShardingPlan.from_json(plan.to_json()) == plan


def test_plans_of_before_dynamic_tables_are_read() -> None:
    plan = make_plan({"t": TableSpec(name="t", num_rows=8, dim=4)}, 2)
    data = json.loads(plan.to_json())
    del data["tables"][0]["takes_any_id"]
    assert ShardingPlan.from_json(json.dumps(data)) == plan
    data["tables"][0]["takes_any_id"] = "no"
    with pytest.raises(ValueError, match="takes_any_id must be true or false, got 'no'"):
        ShardingPlan.from_json(json.dumps(data))


def test_print_says_which_tables_take_any_id() -> None:
    specs = {"big": TableSpec(name="big", num_rows=1000, dim=4, index=DYNAMIC)}
    specs["small"] = TableSpec(name="small", num_rows=2, dim=4)
    assert str(make_plan(specs, 2)) == (
        "table  placement   ranks  rows a rank  ids\n"
        "big    row_wise    0,1    500          any\n"
        "small  table_wise  0      2"
    )


def test_print() -> None:
    specs = {"big": TableSpec(name="big", num_rows=1001, dim=4)}
    specs["small"] = TableSpec(name="small", num_rows=2, dim=4)
    assert str(make_plan(specs, 2)) == (
        "table  placement   ranks  rows a rank\n"
        "big    row_wise    0,1    501\n"
        "small  table_wise  1      2"
    )


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("ranks", [(), (1, 0, 1)])
def test_a_table_is_placed_on_ranks_that_are_different(
    placement: Placement, ranks: tuple[int, ...]
) -> None:
    spec = TableSpec(name="t", num_rows=4, dim=4)
    message = (
        f"ranks of table t must be one or more different ones, got {sorted(ranks)}; name each rank "
        "that holds a part of it, once"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        place_table("t", spec, placement, ranks)


def test_a_whole_table_is_on_one_rank() -> None:
    spec = TableSpec(name="t", num_rows=4, dim=4)
    message = "ranks of table t must be one under table_wise, got [0, 2]; give one of them, or"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        place_table("t", spec, Placement.TABLE_WISE, (2, 0))


def test_bad_plans_are_refused() -> None:
    specs = {"t": TableSpec(name="t", num_rows=4, dim=4)}
    with pytest.raises(
        ValueError, match=re.escape("plan places tables ['u'], which the model lacks")
    ):
        make_plan(specs, 2, {"u": "row_wise"})
    message = (
        "placement of table t must be one of 'data_parallel', 'table_wise', 'column_wise', "
        "'row_wise', 'table_row_wise', got 'x'"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan(specs, 2, {"t": "x"})
    table = TablePlan(
        table="t",
        placement=Placement.TABLE_WISE,
        shards=(Shard(rank=2, first_row=0, num_rows=4, first_column=0, num_columns=4),),
    )
    with pytest.raises(ValueError, match=re.escape("ranks of table t must be in [0, 2), got [2]")):
        ShardingPlan(num_ranks=2, tables=(table,))
    first = dataclasses.replace(table.shards[0], rank=1)
    twice = dataclasses.replace(table, shards=(table.shards[0], first))
    message = "ranks of table t must be different and increase, got [2, 1]"
    with pytest.raises(ValueError, match=re.escape(message)):
        ShardingPlan(num_ranks=3, tables=(twice,))
    with pytest.raises(ValueError, match=re.escape("tables must have different names")):
        ShardingPlan(num_ranks=3, tables=(table, table))
    with pytest.raises(ValueError, match=re.escape("plan has no table u; it has t")):
        ShardingPlan(num_ranks=3, tables=(table,)).table("u")
    with pytest.raises(ValueError, match=re.escape("num_nodes must divide the 3 ranks, got 2")):
        ShardingPlan(num_ranks=3, tables=(), num_nodes=2)
    apart = place_table("t", specs["t"], Placement.TABLE_ROW_WISE, (1, 2))
    message = "ranks of table t must be of one node of 2 ranks, got [1, 2]"
    with pytest.raises(ValueError, match=re.escape(message)):
        ShardingPlan(num_ranks=4, tables=(apart,), num_nodes=2)
