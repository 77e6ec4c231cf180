"""The error for tables that no plan found makes fit."""

from collections.abc import Sequence

from torchembed.sharding.planning.plan_report import PlanReport, bytes_text
from torchembed.sharding.planning.topology import Topology

NUM_HEAVIEST = 3
"""Tables that the error names."""


def refusal(report: PlanReport) -> str:
    """The text of a refusal: what the best plan found lacks, and what would help."""
    topology = report.topology
    fullest = max(report.ranks, key=lambda rank: rank.held_bytes)
    memory = topology.memory_bytes
    heaviest = sorted(report.tables, key=lambda table: -table.weight_bytes)[:NUM_HEAVIEST]
    bytes_of_tables = [table.weight_bytes for table in report.tables]
    whole = sum(bytes_of_tables)
    names = ", ".join(f"{table.table} ({bytes_text(table.weight_bytes)})" for table in heaviest)
    state = sum(table.state_bytes for table in report.tables)
    others = "" if _has_host(topology) or topology.devices_are_hosts else "host memory (Host), "
    others += "a disk (NodeDisk), " if topology.disk.path is None else ""
    growth = ""
    if fullest.growth_bytes:
        growth = f" and {bytes_text(fullest.growth_bytes)} for rows that move as tables grow"
    return (
        f"tables do not fit: in the best plan found rank {fullest.rank} would need "
        f"{bytes_text(fullest.held_bytes)}, {bytes_text(fullest.buffer_bytes)} of it for "
        f"activations and exchange buffers{growth}, and has {bytes_text(memory)}."
        f"{_of_nodes(report)} Rows and optimizer state of all tables take {bytes_text(whole)}, "
        f"{bytes_text(state)} of it state, on {topology.num_ranks} rank(s); the heaviest: {names}. "
        f"Use more ranks (at least {_least_ranks(topology, bytes_of_tables)} for rows and state "
        "alone), a 16-bit dtype for the tables, an optimizer with less state such as "
        f"RowwiseAdagrad, a smaller batch_size, {others}or fewer constraints"
    )


def _has_host(topology: Topology) -> bool:
    """True where rows may be in the memory of hosts beside that of devices."""
    return topology.host.memory_bytes > 0 and not topology.devices_are_hosts


def _least_ranks(topology: Topology, bytes_of_tables: Sequence[int]) -> int:
    """The fewest ranks, of nodes like those of ``topology``, whose devices, hosts and disks
    together have room for tables of so many bytes, each of which is in one kind of memory."""
    per_node = topology.ranks_per_node
    of_node = [topology.memory_bytes * per_node, topology.disk.capacity_bytes or 0]
    if _has_host(topology):
        of_node.append(topology.host.memory_bytes)
    pairs = ((sum(bytes_of_tables), sum(of_node)), (max(bytes_of_tables), max(of_node)))
    return max(-(-needed * per_node // has) for needed, has in pairs)


def _of_nodes(report: PlanReport) -> str:
    """Sentences on what the fullest node needs of its host's memory and of its disk, and on what
    all nodes have, for each of the two that counts. What nothing is put into is not needed."""
    topology = report.topology
    per_node, num_nodes = topology.ranks_per_node, topology.num_nodes
    needs, sums = "", ""
    for what, has, of_ranks in (
        ("memory of its host", topology.host.memory_bytes, [r.host_bytes for r in report.ranks]),
        ("disk", topology.disk.capacity_bytes or 0, [rank.disk_bytes for rank in report.ranks]),
    ):
        of_nodes = [
            sum(of_ranks[first : first + per_node])
            for first in range(0, topology.num_ranks, per_node)
        ]
        most = max(of_nodes)
        if most:
            needs += (
                f" Node {of_nodes.index(most)} would need {bytes_text(most)} of the {what}, and "
                f"has {bytes_text(has)}."
            )
        if has or most:
            sums += f", all {what.split()[-1]}s {bytes_text(num_nodes * has)}"
    if not sums:
        return ""
    devices = bytes_text(topology.num_ranks * topology.memory_bytes)
    return f"{needs} All devices together have {devices}{sums}."
