"""Which tables planners place on disk, and what they refuse."""

import dataclasses
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.support.planning import (
    assert_planned_within,
    cost_model,
    make_stored_use,
    make_tiered_topology,
    make_use,
)
from torchembed import optim
from torchembed.sharding import (
    Host,
    NodeDisk,
    Planner,
    TableConstraint,
    TableUse,
)
from torchembed.sharding.planning.plan import Placement, place_table
from torchembed.tables import Disk, HostMemory, InPlaceFunction

LINE = 16 * 4 * 2
"""Bytes of a row of 16 columns with Adagrad's state."""
ROWS = 100_000
WHOLE = ROWS * LINE


def three() -> tuple[dict[str, TableUse], Planner]:
    """Equal tables by falling numbers of lookups."""
    tables = {name: make_use(ROWS, 16, name) for name in ("most", "less", "least")}
    planner = Planner(
        batch_size=100, hotness={"most": 40, "less": 5, "least": 1}, placements=("table_wise",)
    )
    return tables, planner


def test_the_less_rows_are_missed_the_slower_is_what_holds_them() -> None:
    tables, planner = three()
    topology = make_tiered_topology(
        1, 1, int(1.6 * WHOLE), host_bytes=int(1.2 * WHOLE), disk_bytes=WHOLE
    )
    report = planner.plan(tables, topology)
    on = {plan.table: plan.storage for plan in report.plan.tables}
    assert on["most"] is None
    assert isinstance(on["less"], HostMemory)
    disk = on["least"]
    assert isinstance(disk, Disk) and disk.path == "/mnt/nvme"
    assert disk.host_rows is not None and disk.cache_rows is not None
    two_batches = cost_model(planner, topology).touched(tables["least"], 2)
    assert disk.cache_rows >= two_batches
    assert disk.host_rows >= disk.cache_rows + two_batches
    (rank,) = report.ranks
    assert rank.held_bytes <= topology.memory_bytes
    assert rank.host_bytes <= topology.host.memory_bytes
    assert rank.disk_bytes == WHOLE
    assert (report.tables[2].host_hit_rate or 0) > (report.tables[2].hit_rate or 0) > 0


def test_a_disk_takes_nothing_where_hosts_have_room() -> None:
    tables, planner = three()
    for memory, host, is_on_device in ((10 * WHOLE, 0, True), (WHOLE, 10 * WHOLE, False)):
        topology = make_tiered_topology(1, 1, memory, host_bytes=host, disk_bytes=10 * WHOLE)
        storages = [plan.storage for plan in planner.plan(tables, topology).plan.tables]
        assert not any(isinstance(storage, Disk) for storage in storages)
        assert all(storage is None for storage in storages) == is_on_device


@pytest.mark.parametrize("host_bytes", [0, WHOLE // 4])
def test_a_model_four_times_as_large_as_devices_and_hosts(host_bytes: int) -> None:
    """Its tables are on disk, also where devices are all that holds rows beside it."""
    tables, planner = three()
    planner = dataclasses.replace(planner, batch_size=10)
    budget = 3 * WHOLE // 4
    topology = make_tiered_topology(
        1, 1, budget - host_bytes, host_bytes=host_bytes, disk_bytes=3 * WHOLE
    )
    if host_bytes == 0:
        topology = dataclasses.replace(topology, devices_are_hosts=True)
    report = planner.plan(tables, topology)
    assert any(isinstance(plan.storage, Disk) for plan in report.plan.tables)
    (rank,) = report.ranks
    assert rank.held_bytes <= topology.memory_bytes and rank.host_bytes <= host_bytes
    nowhere = dataclasses.replace(topology, disk=NodeDisk())
    with pytest.raises(ValueError, match=r"^tables do not fit: .* a disk \(NodeDisk\), or fewer c"):
        planner.plan(tables, nowhere)


def test_what_fits_nowhere_is_refused_with_all_sums() -> None:
    tables = {name: make_use(10**6, 16, name) for name in ("t", "u", "v")}
    planner = Planner(batch_size=10)
    topology = make_tiered_topology(2, 1, 10**8, host_bytes=10**7, disk_bytes=10**6)
    with pytest.raises(ValueError, match="tables do not fit: in the best plan found") as error:
        planner.plan(tables, topology)
    message = str(error.value)
    assert "would need 0 B" not in message  # of the disk, which has no room for any table
    assert (
        "All devices together have 190.7 MiB, all hosts 19.07 MiB, all disks 1.907 MiB. Rows and "
        "optimizer state of all tables take 366.2 MiB, 183.1 MiB of it state, on 2 rank(s)"
    ) in message
    assert "NodeDisk" not in message


@pytest.mark.parametrize(
    ("rows_of_tables", "changes", "least", "advice"),
    [
        # Of 256 MB a rank has room for 10 MB, 20 MB of the host's, and 30 MB of the disk's.
        ([10**5] * 20, {}, 5, "a smaller batch_size, or fewer constraints"),
        ([10**5] * 20, {"disk": NodeDisk()}, 9, "batch_size, a disk (NodeDisk), or fewer"),
        ([10**5] * 20, {"host": Host()}, 7, "batch_size, host memory (Host), or fewer"),
        (
            [10**5] * 20,
            {"disk": NodeDisk(), "host": Host()},
            26,
            "batch_size, host memory (Host), a disk (NodeDisk), or fewer",
        ),
        # On CPUs host memory is that of the ranks.
        ([10**5] * 20, {"devices_are_hosts": True}, 7, "batch_size, or fewer constraints"),
        # One table is on one kind of memory.
        ([20 * 10**5], {}, 9, "a smaller batch_size, or fewer constraints"),
    ],
)
def test_the_fewest_ranks_count_all_kinds_of_memory(
    rows_of_tables: list[int], changes: dict[str, Any], least: int, advice: str
) -> None:
    tables = {f"t{n}": make_use(rows, 16, f"t{n}") for n, rows in enumerate(rows_of_tables)}
    topology = make_tiered_topology(1, 2, 10**7, host_bytes=4 * 10**7, disk_bytes=6 * 10**7)
    topology = dataclasses.replace(topology, **changes)
    with pytest.raises(ValueError, match=r"^tables do not fit: ") as error:
        Planner(batch_size=10).plan(tables, topology)
    message = str(error.value)
    assert f"Use more ranks (at least {least} for rows and state alone)" in message
    assert advice in message
    assert "would need 0 B" not in message


def test_ranks_of_a_node_share_its_disk() -> None:
    storage = Disk(path="/mnt/nvme", host_rows=200, cache_rows=100)
    tables = {name: make_stored_use(ROWS, name, storage=storage) for name in ("a", "b")}
    planner = Planner(batch_size=10, placements=("table_wise",))
    one_node = make_tiered_topology(1, 2, 10**9, host_bytes=10**9, disk_bytes=WHOLE)
    with pytest.raises(
        ValueError, match=r"Node 0 would need 24\.41 MiB of the disk, and has 12\.21 MiB\."
    ):
        planner.plan(tables, one_node)
    # Of one that nobody has named the room is not known.
    unnamed = dataclasses.replace(one_node, disk=NodeDisk())
    assert sum(rank.disk_bytes for rank in planner.plan(tables, unnamed).ranks) == 2 * WHOLE
    two_nodes = make_tiered_topology(2, 1, 10**9, host_bytes=10**9, disk_bytes=WHOLE)
    report = planner.plan(tables, two_nodes)
    assert sorted(plan.shards[0].rank for plan in report.plan.tables) == [0, 1]


def test_rows_that_cannot_be_made_from_their_ids_are_not_on_disk() -> None:
    use = make_use(ROWS, 16, "t")
    spec = dataclasses.replace(use.spec, initializer=InPlaceFunction(torch.nn.init.normal_))
    tables = {"t": dataclasses.replace(use, spec=spec), "u": make_use(ROWS, 16, "u")}
    planner = Planner(batch_size=10, placements=("table_wise",))
    topology = make_tiered_topology(
        1, 1, WHOLE // 2, host_bytes=int(1.2 * WHOLE), disk_bytes=2 * WHOLE
    )
    plan = planner.plan(tables, topology).plan
    assert isinstance(plan.table("t").storage, HostMemory)
    assert isinstance(plan.table("u").storage, Disk)


def test_constraints_name_disks() -> None:
    tables, planner = three()
    exact = dataclasses.replace(
        place_table("most", tables["most"].spec, Placement.TABLE_WISE, (0,)),
        storage=Disk(path="elsewhere", host_rows=20_000, cache_rows=10_000),
    )
    planner = dataclasses.replace(planner, constraints={"most": TableConstraint(exact=exact)})
    topology = make_tiered_topology(
        1, 1, int(1.5 * WHOLE), host_bytes=2 * WHOLE, disk_bytes=3 * WHOLE
    )
    assert planner.plan(tables, topology).plan.table("most") == exact


tables_anywhere = st.lists(
    st.builds(
        lambda rows, dim, feature, storage: make_stored_use(
            rows, feature, storage=storage, dim=dim
        ),
        st.integers(1, 20_000),
        st.sampled_from((4, 8, 24)),
        st.sampled_from(("f0", "f1")),
        st.none()
        | st.none()
        | st.just(HostMemory(cache_rows=500))
        | st.just(Disk(path="d", host_rows=900, cache_rows=300)),
    ),
    min_size=1,
    max_size=5,
).map(lambda uses: {f"t{number}": use for number, use in enumerate(uses)})


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    tables=tables_anywhere,
    num_nodes=st.integers(1, 2),
    ranks_per_node=st.integers(1, 3),
    memory_bytes=st.sampled_from((10**5, 5 * 10**5, 10**7)),
    host_bytes=st.sampled_from((0, 10**5, 5 * 10**5, 10**7)),
    disk_bytes=st.sampled_from((10**5, 5 * 10**5, 10**7)),
    is_on_cpus=st.booleans(),
)
def test_no_plan_takes_more_than_there_is(
    tables: dict[str, TableUse],
    num_nodes: int,
    ranks_per_node: int,
    memory_bytes: int,
    host_bytes: int,
    disk_bytes: int,
    is_on_cpus: bool,
) -> None:
    topology = make_tiered_topology(
        num_nodes, ranks_per_node, memory_bytes, host_bytes=host_bytes, disk_bytes=disk_bytes
    )
    topology = dataclasses.replace(topology, devices_are_hosts=is_on_cpus)
    planner = Planner(batch_size=16, optimizer=optim.RowwiseAdagrad)
    assert_planned_within(planner, tables, topology)
