"""Plans for MLPerf's DLRM-DCNv2 on 1 to 1,024 ranks, and what is said where it does not fit."""

import dataclasses
import functools
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.planning import dlrm_dcnv2, make_topology, make_use
from torchembed import optim
from torchembed.sharding import H200, Placement, Planner, PlanReport, Topology

TABLES, HOTNESS = dlrm_dcnv2()
NUM_RANKS = (1, 8, 256, 1024)
# Without parallelism a whole model of 195 GiB has to fit.
ROOMY_BYTES = 256 << 30


def topology_of(num_ranks: int) -> Topology:
    topology = Topology.of_hardware(
        H200, ranks_per_node=min(num_ranks, 8), num_nodes=max(num_ranks // 8, 1)
    )
    return dataclasses.replace(topology, memory_bytes=ROOMY_BYTES) if num_ranks == 1 else topology


@functools.cache
def plan_in_seconds(num_ranks: int, **settings: Any) -> PlanReport:
    """A plan by the planner of these ``settings``."""
    planner = Planner(batch_size=8192, hotness=HOTNESS, **settings)
    start = time.process_time()
    report = planner.plan(TABLES, topology_of(num_ranks))
    assert time.process_time() - start < 100  # some seconds, on a machine that may be slow
    memory = report.topology.memory_bytes
    assert max(rank.held_bytes for rank in report.ranks) <= memory
    return report


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_ranks_are_balanced(num_ranks: int) -> None:
    report = plan_in_seconds(num_ranks, max_imbalance=1.15)
    assert report.balance <= 1.15
    # Adagrad holds as much state as there are weights, in float32: 204,184,588 rows of 128.
    elements = sum(
        shard.num_rows * shard.num_columns for table in report.plan.tables for shard in table.shards
    )
    assert sum(rank.weight_bytes for rank in report.ranks) == elements * 8
    assert sum(table.weight_bytes for table in report.tables) == 204_184_588 * 128 * 8


@pytest.mark.parametrize(
    ("num_ranks", "fixed_hotness"),
    [(2, False), (4, False), (8, False), (16, False), (8, True), (16, True)],
)
def test_the_fastest_plan_is_balanced_up_to_two_nodes(num_ranks: int, fixed_hotness: bool) -> None:
    report = plan_in_seconds(num_ranks, fixed_hotness=fixed_hotness)
    assert report.balance <= 1.15
    # Ranks keep the work of a rank: twice the ranks on a node do not take longer by a third.
    if num_ranks <= 8:
        alone = plan_in_seconds(num_ranks // 2, fixed_hotness=fixed_hotness)
        assert report.seconds < 1.34 * alone.seconds


def test_an_even_load_is_more_work_where_one_table_dominates() -> None:
    """Why a planner is not bound to one by default."""
    fastest = plan_in_seconds(256)
    even = plan_in_seconds(256, max_imbalance=1.15)
    assert even.balance <= 1.15 < fastest.balance
    assert fastest.seconds < even.seconds / even.balance


def test_columns_pay_under_the_other_optimizer_too() -> None:
    report = plan_in_seconds(32, optimizer=optim.RowwiseAdagrad)
    assert "column_wise" in {table.placement.value for table in report.plan.tables}
    others = tuple(placement for placement in Placement if placement is not Placement.COLUMN_WISE)
    without = plan_in_seconds(32, optimizer=optim.RowwiseAdagrad, placements=others)
    assert report.seconds < without.seconds


def test_a_model_that_cannot_fit_is_refused_with_what_is_missing() -> None:
    topology = Topology.of_hardware(H200, ranks_per_node=1)
    message = (
        "tables do not fit: in the best plan found rank 0 would need 195 GiB, 269.1 MiB of it for "
        "activations and exchange buffers, and has 118.1 GiB. Rows and optimizer state of all "
        "tables take 194.7 GiB, 97.36 GiB of it state, on 1 rank(s); the heaviest: cat_0 (38.15 "
        "GiB), cat_9 (38.15 GiB), cat_19 (38.15 GiB). Use more ranks (at least 2 for rows and "
        "state alone), a 16-bit dtype for the tables, an optimizer with less state such as "
        "RowwiseAdagrad, a smaller batch_size, host memory (Host), a disk (NodeDisk), or fewer "
        "constraints"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Planner(batch_size=8192, hotness=HOTNESS).plan(TABLES, topology)


def test_buffers_alone_may_not_fit() -> None:
    with pytest.raises(ValueError, match=re.escape("tables do not fit")):
        Planner(batch_size=10**6).plan({"t": make_use(10, 16, "f")}, make_topology(1, 2, 10**6))


def test_many_tables_take_seconds() -> None:
    tables = {f"t{n}": make_use(10 + n * n * 7919 % 10**7, 64, f"f{n}") for n in range(400)}
    hotness = {f"f{n}": 1 + n % 13 for n in range(400)}
    start = time.process_time()
    report = Planner(batch_size=2048, hotness=hotness).plan(tables, make_topology(2, 8))
    assert time.process_time() - start < 30
    assert report.balance < 1.15


def test_bench_prints_draws_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tyro", reason="the bench needs tyro")
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    from bench.planning.plan import main

    picture, plan = tmp_path / "plan.png", tmp_path / "plan.json"
    files = ("--picture", str(picture), "--json", str(plan))
    monkeypatch.setattr("sys.argv", ["plan", "--num-ranks", "8", *files])
    main()
    printed = capsys.readouterr().out
    assert printed.startswith("26 tables on 1 node(s) of 8 rank(s), 8192 samples a rank\n")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert json.loads(plan.read_text())["num_ranks"] == 8

    of_one = ("--num-ranks", "1", "--memory-gib", "16", "--host-gib", "64", "--disk-gib", "256")
    monkeypatch.setattr("sys.argv", ["plan", *of_one, "--ids", "zipf"])
    main()
    printed = capsys.readouterr().out
    assert "  host, " in printed and "  disk rows, " in printed
    monkeypatch.setattr("sys.argv", ["plan", *of_one[:-1], "1"])
    with pytest.raises(SystemExit, match="tables do not fit"):
        main()
