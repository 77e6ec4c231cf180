"""Costs of a worked example, to the byte; and what reports and pictures show of them."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

from tests.support.planning import cost_model, make_topology, make_use
from tests.support.tolerance import relative_error
from torchembed import LFU, LRU, Dynamic, optim
from torchembed.sharding import (
    Placement,
    Planner,
    ShardingPlan,
    TableConstraint,
    WirePrecision,
    draw_plan,
)
from torchembed.sharding.planning.costs import (
    CACHED_ROW_BYTE,
    ROW_ACCESS_BYTES,
)
from torchembed.sharding.planning.distinct_rows import (
    _NUM_HALVINGS,
    MAX_EXPONENT,
    expected_distinct,
)
from torchembed.sharding.planning.load_seconds import LOOKUP_KERNELS, UPDATE_KERNELS
from torchembed.sharding.planning.loads import Everywhere, Load
from torchembed.sharding.planning.plan import place_table
from torchembed.sharding.planning.plan_report import bytes_text, ranks_text, report_plan
from torchembed.sharding.planning.table_use import TableUse
from torchembed.sharding.planning.topology import Topology
from torchembed.tables import Eviction, HashFactory, RangeFactory

# 8 rows of 16 columns: 64 bytes a row, weights, state and vectors alike. 2 features with 2 and 1
# lookups a sample, 4 samples on each of 4 ranks on 2 nodes: 48 lookups, 12 of each rank.
USE = make_use(8, 16, "f", "g")
HOTNESS = {"f": 2, "g": 1}
TOPOLOGY = make_topology(2, 2)
PLANNER = Planner(batch_size=4, hotness=HOTNESS)
MODEL = cost_model(PLANNER, TOPOLOGY)
CACHED, ACCESS = CACHED_ROW_BYTE, ROW_ACCESS_BYTES


def looked_up(lookups: float, touched: float, row_bytes: int = 64) -> float:
    """Bytes of rows: each from memory once, and then from the cache."""
    return (row_bytes + ACCESS) * (touched + CACHED * (lookups - touched))


def updated(lookups: float, touched: float, row_bytes: int = 64, state_bytes: int = 64) -> float:
    """Bytes of as wide gradients read; of rows and state read and written."""
    rows = touched * 2 * (row_bytes + ACCESS + state_bytes + ACCESS)
    return lookups * (row_bytes + ACCESS) + rows


ROUNDING = relative_error(64, torch.float64)
"""Costs are sums of products of positive numbers, of fewer roundings than that."""
EXPONENT, EXPONENT_ERROR = 0.9, 2 * MAX_EXPONENT * 2.0**-_NUM_HALVINGS
"""Exponent of the ids' law, and how far off an exponent is at most that halving finds: its last
step, and as much for comparisons that rounding has decided otherwise, which are nearer to the
exponent."""


def assert_costs_of_skewed(found: ArrayLike, cost: Callable[[float], float], num_ids: int) -> None:
    """Assert that ``found`` is the ``cost`` of the rows out of 1000 that so many ids touch."""
    least, most = (
        cost(expected_distinct(1000, [(num_ids, EXPONENT + error)]))
        for error in (EXPONENT_ERROR, -EXPONENT_ERROR)
    )
    assert np.all(np.asarray(found) >= least * (1 - ROUNDING))
    assert np.all(np.asarray(found) <= most * (1 + ROUNDING))


def loads_of(
    placement: Placement,
    ranks: tuple[int, ...],
    planner: Planner = PLANNER,
    wire: WirePrecision | None = None,
) -> tuple[np.ndarray, Everywhere]:
    """Without the loads of rows that are not on the device, of which there are none."""
    model = cost_model(planner, TOPOLOGY, wire)
    loads, everywhere = model.table_loads(USE, place_table("t", USE.spec, placement, ranks))
    assert not loads[:, Load.HOST :].any()
    return loads[:, : Load.HOST], everywhere


def test_table_wise() -> None:
    (load,), everywhere = loads_of(Placement.TABLE_WISE, (0,))
    touched = 8 * (1 - math.exp(-48 / 8))
    ids = 4 * 12 + 8 * 8  # and the lengths of 8 bags
    np.testing.assert_allclose(
        load,
        [
            4 * ids + looked_up(48, touched) + 4 * 8 * 64,
            updated(48, touched),
            ids,
            8 * 64,
            8 * 64,
            8 * 64 * 2 + 4 * (4 * ids + 2 * 8 * 64) + 4 * 2 * 8 * 64,  # two copies to pass on
        ],
        rtol=ROUNDING,
    )
    assert load[Load.HELD] == 6912 + 4096
    assert everywhere == (2 * 8 * 64, 2 * 8 * 64, 0, ids + 4 * 8 * 64)


def test_column_wise_with_narrow_wires() -> None:
    wire = WirePrecision(forward=torch.bfloat16, backward=torch.float16)
    loads, everywhere = loads_of(Placement.COLUMN_WISE, (1, 3), wire=wire)
    touched = 8 * (1 - math.exp(-48 / 8))
    ids = 4 * 12 + 8 * 8
    # Vectors travel as 8 columns of 2 bytes.
    expected = [
        4 * ids + looked_up(48, touched, 32) + 4 * 8 * 32,
        updated(48, touched, 32, 32),
        ids,
        8 * 16,
        8 * 16,
        8 * 32 * 2 + 4 * (4 * ids + 2 * 8 * 16) + 4 * 2 * 8 * 16,
    ]
    np.testing.assert_allclose(loads, [expected, expected], rtol=ROUNDING)
    assert everywhere == (2 * 128 + 512, 2 * 128 + 512, 0, 2 * (ids + 256) + 2 * 512)


def test_vectors_in_8_bits_have_a_byte_more_for_their_scale() -> None:
    wire = WirePrecision(forward=torch.float8_e4m3fn, backward=torch.bfloat16)
    loads, _ = loads_of(Placement.COLUMN_WISE, (1, 3), wire=wire)
    assert loads[:, Load.VECTORS].tolist() == [8 * 9, 8 * 9]
    assert loads[:, Load.GRADIENTS].tolist() == [8 * 16, 8 * 16]


def test_column_wise_under_row_wise_adagrad() -> None:
    """Two ranks exchange one float32 for each of 48 lookups, and go over 48 sums of 8 columns."""
    planner = Planner(batch_size=4, hotness=HOTNESS, optimizer=optim.RowwiseAdagrad)
    loads, everywhere = loads_of(Placement.COLUMN_WISE, (1, 3), planner)
    touched = 8 * (1 - math.exp(-48 / 8))
    ids = 4 * 12 + 8 * 8
    squares, summed = 48 * 4, 48 * 8 * 4
    expected = [
        4 * ids + looked_up(48, touched, 32) + 4 * 8 * 32,
        updated(48, touched, 32, 4) + 7 * summed + 4 * 2 * squares,
        ids,
        8 * 32,
        8 * 32 + squares / 3,  # from one of three other ranks
        8 * (32 + 4) + 4 * (4 * ids + 4 * 8 * 32) + 3 * summed + 2 * 2 * squares,
    ]
    np.testing.assert_allclose(loads, [expected, expected], rtol=ROUNDING)
    assert everywhere == (2 * 256 + 512, 2 * 256 + 512, 0, 2 * (ids + 512) + 2 * 512)


@pytest.mark.parametrize("fixed", [False, True])
def test_row_wise(fixed: bool) -> None:
    planner = Planner(
        batch_size=4, hotness=HOTNESS, fixed_hotness=fixed, optimizer=optim.RowwiseAdagrad
    )
    loads, everywhere = loads_of(Placement.ROW_WISE, (0, 1, 2, 3), planner)
    touched = 2 * (1 - math.exp(-12 / 2))
    ids = 4 * 12 if fixed else 4 * 3 + 8 * 8
    expected = [
        4 * ids + looked_up(12, touched) + 4 * 8 * 64,
        updated(12, touched, 64, 4),
        ids,
        8 * 64,
        8 * 64,
        2 * (64 + 4) + 4 * (4 * ids + 2 * 8 * 64) + 4 * 2 * 8 * 64,
    ]
    np.testing.assert_allclose(loads, [expected] * 4, rtol=ROUNDING)
    stacked = 4 * 512
    arrived = 4 * 512 + 2 * stacked + 512
    assert everywhere == (arrived, 4 * 512 + 512, 0, 4 * (ids + 1024) + stacked + 2 * 512)


def test_row_wise_sequence_sends_each_vector_once() -> None:
    use = make_use(8, 16, "f", "g", pooled=False)
    plan = place_table("t", use.spec, Placement.ROW_WISE, (0, 1, 2, 3))
    loads, everywhere = MODEL.table_loads(use, plan)
    np.testing.assert_allclose(loads[:, Load.VECTORS], [3 * 64] * 4, rtol=ROUNDING)
    np.testing.assert_allclose(loads[:, Load.GRADIENTS], [3 * 64] * 4, rtol=ROUNDING)
    assert everywhere.lookup_bytes == 12 * 64 + 12 * 64


def test_sequences_travel_alike_with_fixed_hotness() -> None:
    use = make_use(8, 16, "f", "g", pooled=False)
    plan = place_table("t", use.spec, Placement.ROW_WISE, (0, 1, 2, 3))
    fixed = cost_model(Planner(batch_size=4, hotness=HOTNESS, fixed_hotness=True), TOPOLOGY)
    loads, everywhere = fixed.table_loads(use, plan)
    expected, expected_everywhere = MODEL.table_loads(use, plan)
    np.testing.assert_array_equal(loads, expected)
    np.testing.assert_array_equal(loads[:, Load.IDS], [4 * 3 + 8 * 8] * 4)
    assert everywhere == expected_everywhere


def test_data_parallel() -> None:
    loads, everywhere = loads_of(Placement.DATA_PARALLEL, (0, 1, 2, 3))
    assert not loads.any()
    dense = 8 * 17 * 4
    assert everywhere == (
        4 * 12 + looked_up(12, 8 * (1 - math.exp(-12 / 8))) + 512,
        updated(12, 8) + 6 * dense,
        dense,
        8 * 64 * 2 + 4 * 4 * 12 + 3 * dense + 2 * 512,
    )
    # Half of it each way within a node twice; then half of that half between the two nodes.
    expected = dense / 1e8 + dense / 2 / 1e7
    assert MODEL.all_reduce_seconds(everywhere.all_reduce_bytes) == pytest.approx(
        expected, rel=ROUNDING, abs=0
    )


def test_skewed_ids_touch_fewer_rows() -> None:
    """What one rank's ids say holds for those of all four, and for the 12 of one alone."""
    use = make_use(1000, 16, "f", "g")
    distinct = {
        name: expected_distinct(1000, [(count, EXPONENT)]) for name, count in (("f", 8), ("g", 4))
    }
    planner = dataclasses.replace(PLANNER, distinct_ids=distinct)
    model = cost_model(planner, TOPOLOGY)
    plan = place_table("t", use.spec, Placement.ROW_WISE, (0, 1, 2, 3))
    loads, _ = model.table_loads(use, plan)
    touched = expected_distinct(1000, [(32, EXPONENT), (16, EXPONENT)])
    assert touched == pytest.approx(expected_distinct(1000, [(48, EXPONENT)]), rel=ROUNDING, abs=0)
    assert touched < 0.9 * expected_distinct(1000, [(48, 0.0)])
    assert_costs_of_skewed(loads[:, Load.UPDATE], lambda rows: updated(12, rows / 4), 48)
    uniform, _ = MODEL.table_loads(use, plan)
    assert (loads[:, Load.LOOKUP] < uniform[:, Load.LOOKUP]).all()
    np.testing.assert_array_equal(loads[:, 2:], uniform[:, 2:])
    replicated = place_table("t", use.spec, Placement.DATA_PARALLEL, (0, 1, 2, 3))
    _, everywhere = model.table_loads(use, replicated)
    assert_costs_of_skewed(
        everywhere.lookup_bytes, lambda rows: 4 * 12 + looked_up(12, rows) + 512, 12
    )


def busiest_seconds(own: list[float], topology: Topology) -> np.ndarray:
    """Seconds of each rank's busiest link, message by message: from each rank of samples to each
    rank of rows, directly, or by the rank of its place in that rank's node."""
    per_node, num_ranks = topology.ranks_per_node, topology.num_ranks
    moved = np.zeros((2, 2, num_ranks))  # between nodes or within; sent or received

    def move(sender: int, receiver: int, num_bytes: float) -> None:
        if sender != receiver:
            is_within = int(sender // per_node == receiver // per_node)
            moved[is_within, 0, sender] += num_bytes
            moved[is_within, 1, receiver] += num_bytes

    for of_samples in range(num_ranks):
        for of_rows, num_bytes in enumerate(own):
            relay = of_rows // per_node * per_node + of_samples % per_node
            if topology.has_two_levels:
                move(of_samples, relay, num_bytes)
            move(relay if topology.has_two_levels else of_samples, of_rows, num_bytes)
    between, within = moved.max(axis=1)
    between = between / topology.inter_node_bandwidth
    within = within / topology.intra_node_bandwidth
    return between + within if topology.has_two_levels else np.maximum(between, within)


@pytest.mark.parametrize("nodes", [(1, 6), (6, 1), (2, 3), (3, 2)])
def test_busiest_link_of_each_rank(nodes: tuple[int, int]) -> None:
    topology = make_topology(*nodes)
    model = dataclasses.replace(MODEL, topology=topology)
    for own in ([1000.0, 0, 0, 0, 0, 0], [5.0, 1, 4, 7, 2, 6], [3.0] * 6):
        loads = np.zeros((6, len(Load)))
        loads[:, Load.VECTORS] = own
        seconds = model.wire_seconds(loads)[:, Load.VECTORS - Load.IDS]
        np.testing.assert_allclose(seconds, busiest_seconds(own, topology), rtol=ROUNDING)
    # That of a rank alone is what its part adds where its own side is the busiest.
    loads = np.zeros((6, len(Load)))
    loads[0, Load.VECTORS] = 1000.0
    np.testing.assert_allclose(
        model.holder_seconds(loads[:1]), model.wire_seconds(loads)[0].sum(), rtol=ROUNDING
    )


THREE_TABLES = {"t": USE, "u": make_use(100, 16, "f"), "v": make_use(3, 16, "g")}
THREE_PLANS = (
    place_table("t", USE.spec, Placement.TABLE_WISE, (0,)),
    place_table("u", THREE_TABLES["u"].spec, Placement.ROW_WISE, (0, 1, 2, 3)),
    place_table("v", THREE_TABLES["v"].spec, Placement.DATA_PARALLEL, (0, 1, 2, 3)),
)


def test_each_group_of_tables_has_calls_of_its_own() -> None:
    """Rows of one width are one group on a rank, and so are replicas."""
    tables = THREE_TABLES | {
        "w": make_use(100, 32, "g"),
        "x": make_use(100, 16, "f", pooled=False),
    }
    plan = ShardingPlan(
        num_ranks=4,
        num_nodes=2,
        tables=(
            *THREE_PLANS,
            place_table("w", tables["w"].spec, Placement.COLUMN_WISE, (1, 2, 3)),
            place_table("x", tables["x"].spec, Placement.TABLE_WISE, (3,)),
        ),
    )
    slow = dataclasses.replace(TOPOLOGY, kernel_seconds=1.0)
    ranks = report_plan(plan, tables, cost_model(PLANNER, slow)).ranks
    alone = report_plan(plan, tables, MODEL).ranks
    # 32 columns on 3 ranks are 11, 11 and 10.
    for rank, before, num_groups in zip(ranks, alone, (2, 3, 3, 4), strict=True):
        lookup, update = LOOKUP_KERNELS * num_groups, UPDATE_KERNELS * num_groups
        assert rank.lookup_seconds - before.lookup_seconds == pytest.approx(
            lookup, rel=0, abs=ROUNDING * rank.lookup_seconds
        )
        assert rank.update_seconds - before.update_seconds == pytest.approx(
            update, rel=0, abs=ROUNDING * rank.update_seconds
        )


def test_report_adds_up() -> None:
    plan = ShardingPlan(num_ranks=4, num_nodes=2, tables=THREE_PLANS)
    report = report_plan(plan, THREE_TABLES, MODEL)
    assert [table.weight_bytes for table in report.tables] == [8 * 128, 100 * 128, 3 * 128]
    assert [table.state_bytes for table in report.tables] == [8 * 64, 100 * 64, 3 * 64]
    assert [table.busiest_bytes for table in report.tables] == [8 * 128, 25 * 128, 3 * 128]
    assert [table.lookups for table in report.tables] == [3, 2, 1]
    shared = 25 * 128 + 3 * 128
    assert [rank.weight_bytes for rank in report.ranks] == [shared + 8 * 128, *[shared] * 3]
    assert report.seconds == report.ranks[0].seconds
    mean = sum(rank.seconds for rank in report.ranks) / 4
    assert report.balance == pytest.approx(report.seconds / mean, rel=ROUNDING, abs=0)


def test_print() -> None:
    tables = {"t": make_use(10**6, 16, "f"), "small": make_use(3, 16, "g")}
    constraints = {"small": TableConstraint(placements=("data_parallel",))}
    planner = Planner(batch_size=4, placements=("table_wise",), constraints=constraints)
    lines = str(planner.plan(tables, make_topology(1, 2))).splitlines()
    assert lines[0] == "2 tables on 1 node(s) of 2 rank(s), 4 samples a rank"
    head = ["table", "placement", "ranks", "bytes", "most on a rank", "lookups", "ms alone"]
    assert re.split(r" {2,}", lines[2]) == head
    assert lines[3].split()[:7] == ["t", "table_wise", "0", "122.1", "MiB", "122.1", "MiB"]
    assert lines[4].split()[:3] == ["small", "data_parallel", "0-1"]
    assert len({len(line) for line in lines[2:5]}) == 1
    assert [line.split()[0] for line in lines[6:9]] == ["rank", "0", "1"]
    assert lines[-1].startswith("predicted: ")
    assert lines[-1].endswith("of 931.3 GiB")


def dynamic_use(capacity: int, eviction: Eviction) -> TableUse:
    use, index = make_use(capacity, 16, "f", "g"), HashFactory(Dynamic(eviction=eviction))
    return dataclasses.replace(use, spec=dataclasses.replace(use.spec, index=index))


@pytest.mark.parametrize(("eviction", "row_bytes"), [(LRU(), 17), (LFU(), 25)])
def test_a_dynamic_table_holds_ids_and_reads_where_they_are(
    eviction: Eviction, row_bytes: int
) -> None:
    """Its ids take 4 bytes more each in an exchange, and are found twice."""
    use, ranks = dynamic_use(4096, eviction), (0, 1, 2, 3)
    static = dataclasses.replace(use, spec=dataclasses.replace(use.spec, index=RangeFactory()))
    (of_dynamic, everywhere), (of_static, others) = (
        MODEL.table_loads(u, place_table("t", u.spec, Placement.ROW_WISE, ranks))
        for u in (use, static)
    )
    touched = expected_distinct(4096, [(32, 0.0), (16, 0.0)]) / 4
    probe = 2 * (128 + ACCESS) + 8 + ACCESS
    found = touched + CACHED * (48 / 4 - touched)
    more_ids = 4 * 12 / 4
    expected = np.zeros(len(Load))
    expected[Load.IDS] = more_ids
    expected[Load.LOOKUP] = 4 * more_ids + 2 * probe * found + 2 * (8 + ACCESS) * touched
    expected[Load.HELD] = 1024 * row_bytes + 4 * 4 * more_ids
    np.testing.assert_allclose(of_dynamic, of_static + expected, rtol=ROUNDING)
    assert everywhere.held_bytes == others.held_bytes + 4 * more_ids
    assert use.table_group(16) != static.table_group(16)


def test_a_planner_places_dynamic_tables_but_not_on_every_rank() -> None:
    use = dynamic_use(3, LRU())  # a static table of as few rows would be data-parallel
    report = Planner(batch_size=1024).plan({"t": use}, make_topology(1, 2))
    assert report.plan.table("t").placement is not Placement.DATA_PARALLEL
    assert report.plan.table("t").takes_any_id
    (line,) = [line for line in str(report).splitlines() if line.startswith("t ")]
    assert ", any id  " in line
    replicas = {"t": TableConstraint(placements=("data_parallel",))}
    with pytest.raises(ValueError, match="placement of dynamic table t must not be data_parallel"):
        Planner(constraints=replicas).plan({"t": use}, make_topology(1, 2))


def test_many_ranks_are_summed_up() -> None:
    tables = {"t": make_use(10**6, 16, "f")}
    planner = Planner(batch_size=4, placements=("table_wise",))
    lines = str(planner.plan(tables, make_topology(3, 8))).splitlines()
    ranks = [line.split()[0] for line in lines[5 : lines.index("", 5)]]
    assert ranks[0] == "rank"
    assert ranks[1] == "0"
    assert len(ranks) == 3


def test_texts() -> None:
    assert ranks_text((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
    assert ranks_text(()) == ""
    sizes = (0, 1023, 1024, 5 * 2**20, 3 * 2**30, 2**41)
    texts = ["0 B", "1023 B", "1 KiB", "5 MiB", "3 GiB", "2 TiB"]
    assert [bytes_text(size) for size in sizes] == texts


@pytest.mark.parametrize("ranks_per_node", [1, 8])
def test_picture_is_a_png(ranks_per_node: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    report = PLANNER.plan({"t": USE}, make_topology(2, ranks_per_node))
    draw_plan(report, tmp_path / "plan.png", title="a title")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG\r\n")
