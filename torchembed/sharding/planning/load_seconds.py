"""The time that loads take on a topology: of memory, of links, of the host and of disks."""

import dataclasses
from typing import TypeVar

import numpy as np

from torchembed.sharding.planning.loads import WIRES, Everywhere, Load
from torchembed.sharding.planning.topology import Topology

LOOKUP_KERNELS, UPDATE_KERNELS = 0.8, 3
"""Kernel launches, in units of `kernel_seconds`, for each group of a rank's tables that are looked
up and updated in one call; replicated tables form a group of their own."""
ALL_REDUCE_EXCHANGES = 1.5
"""Latency of an all-reduce, in units of an exchange's."""

Numbers = TypeVar("Numbers", float, np.ndarray)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadSeconds:
    """Seconds that the ranks of a topology take for loads."""

    topology: Topology

    def lookup_seconds(self, num_bytes: Numbers, num_groups: Numbers | int = 0) -> Numbers:
        """Seconds for ``LOOKUP`` bytes in ``num_groups`` calls; numbers or arrays."""
        fixed = LOOKUP_KERNELS * self.topology.kernel_seconds
        return num_bytes / self.topology.memory_bandwidth + num_groups * fixed

    def update_seconds(self, num_bytes: Numbers, num_groups: Numbers | int = 0) -> Numbers:
        """Seconds for ``UPDATE`` bytes in ``num_groups`` calls; numbers or arrays."""
        fixed = UPDATE_KERNELS * self.topology.kernel_seconds
        return num_bytes / self.topology.memory_bandwidth + num_groups * fixed

    def fetch_seconds(self, loads: np.ndarray) -> np.ndarray:
        """Seconds for rows that come from the host while others are written back, while a rank does
        nothing else, for each of ``loads [n, len(Load)]``, float64 ``[n]``."""
        return loads[:, Load.FETCHED] / self.topology.host_bandwidth

    def disk_seconds(self, loads: np.ndarray) -> np.ndarray:
        """Seconds for rows that come from disk while others go there, likewise."""
        return loads[:, Load.READ] / self.topology.disk_bandwidth

    def all_reduce_seconds(self, num_bytes: float) -> float:
        """Seconds for an all-reduce of ``num_bytes`` on each rank.

        Modelled as a reduce-scatter and an all-gather within each node, and between nodes as the
        same of each rank's part.
        """
        nodes, per_node = self.topology.num_nodes, self.topology.ranks_per_node
        within = 2 * num_bytes * (per_node - 1) / per_node / self.topology.intra_node_bandwidth
        part = num_bytes / per_node
        return within + 2 * part * (nodes - 1) / nodes / self.topology.inter_node_bandwidth

    def wire_seconds(self, loads: np.ndarray) -> np.ndarray:
        """Seconds of each rank's busiest link and direction in the three exchanges, float64
        ``[W, 3]``.

        Args:
            loads: ``[W, len(Load)]``, the loads of the shards that each rank holds. It receives the
                ids and gradients and sends the vectors of its own shards; in the other direction go
                those of all other ranks' shards. In two levels, one after the other, the links
                between nodes carry what is for any rank of a node, and those within a node what
                came from all nodes.
        """
        topology = self.topology
        num_nodes, per_node = topology.num_nodes, topology.ranks_per_node
        own = loads[:, WIRES]
        of_nodes = own.reshape(num_nodes, per_node, 3).sum(axis=1)
        of_node = np.repeat(of_nodes, per_node, axis=0)
        total = of_nodes.sum(axis=0)
        within = np.maximum((per_node - 1) * own, of_node - own) / topology.intra_node_bandwidth
        if topology.has_two_levels:
            between = np.maximum((num_nodes - 1) * of_node, total - of_node)
            return num_nodes * within + between / topology.inter_node_bandwidth
        between = np.maximum((num_nodes - 1) * per_node * own, total - of_node)
        return np.maximum(within, between / topology.inter_node_bandwidth)

    def rank_seconds(
        self, loads: np.ndarray, everywhere: Everywhere, num_groups: np.ndarray | int = 0
    ) -> np.ndarray:
        """Seconds of each rank for memory and its busiest link, one after the other, float64
        ``[W]``.

        Args:
            num_groups: groups of each rank's tables, ``[W]``, replicas among them.
        """
        lookup = self.lookup_seconds(loads[:, Load.LOOKUP] + everywhere.lookup_bytes, num_groups)
        update = self.update_seconds(loads[:, Load.UPDATE] + everywhere.update_bytes, num_groups)
        common = self.all_reduce_seconds(everywhere.all_reduce_bytes)
        tiers = self.fetch_seconds(loads) + self.disk_seconds(loads)
        return lookup + update + self.wire_seconds(loads).sum(axis=1) + common + tiers

    def holder_seconds(self, loads: np.ndarray) -> np.ndarray:
        """Seconds that each of ``loads [n, len(Load)]`` adds to a rank whose own side is its
        busiest, float64 ``[n]``."""
        topology = self.topology
        num_nodes, per_node = topology.num_nodes, topology.ranks_per_node
        within = (per_node - 1) / topology.intra_node_bandwidth
        between = (num_nodes - 1) / topology.inter_node_bandwidth
        # In two levels the links of all ranks of a node share what is for one of them.
        wire = num_nodes * within + between if topology.has_two_levels else max(within, between)
        lookup = self.lookup_seconds(loads[:, Load.LOOKUP])
        update = self.update_seconds(loads[:, Load.UPDATE])
        tiers = self.fetch_seconds(loads) + self.disk_seconds(loads)
        return lookup + update + wire * loads[:, WIRES].sum(axis=1) + tiers
