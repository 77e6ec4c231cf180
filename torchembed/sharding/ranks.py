"""The ranks that share a model's tables: their mesh, and the meshes of some of them."""

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchembed.sharding.data_parallel import row_gradient_mean
from torchembed.sharding.plan import TablePlan
from torchembed.sharding.wire import WirePrecision


def num_nodes(mesh: DeviceMesh) -> int:
    """Nodes of a mesh: a one-dimensional one is of one node."""
    return mesh.mesh.shape[0] if mesh.ndim == 2 else 1


def flat_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """``mesh`` in one dimension, node by node where it has two: nodes, and ranks in a node.

    Collective where it has two dimensions.

    Raises:
        ValueError: for more dimensions, ranks that do not increase, or two dimensions over some of
            all processes.
    """
    if mesh.ndim > 2:
        raise ValueError(
            f"mesh must have one dimension, or two (nodes, ranks in a node), got {mesh.ndim}; "
            "take a slice of it"
        )
    processes = mesh.mesh.flatten().tolist()
    if processes != sorted(processes):
        raise ValueError(f"mesh must hold its ranks in increasing order, got {processes}")
    flat = mesh if mesh.ndim == 1 else _mesh_of(processes, mesh)
    assert flat is not None
    return flat


def _mesh_of(processes: Sequence[int], mesh: DeviceMesh) -> DeviceMesh | None:
    """A one-dimensional mesh of some processes of ``mesh``, None on the others; all call for it.

    Raises:
        ValueError: where ``mesh`` is of some of all processes: torch makes groups with all only.
    """
    if mesh.size() < dist.get_world_size():
        raise ValueError(
            f"mesh must hold all {dist.get_world_size()} processes where it has two dimensions or "
            f"some of its ranks only share a table, got {mesh.size()}; start these by themselves"
        )
    group = dist.group.WORLD
    if len(processes) < dist.get_world_size():
        group = dist.new_group(list(processes))
    if dist.get_rank() not in processes:
        return None
    assert isinstance(group, dist.ProcessGroup)
    return DeviceMesh.from_group(group, mesh.device_type)


class Ranks:
    """Every rank that shares a model's tables, as one of them sees it.

    Making one is collective: where a divided table is held by some of the ranks, these get a
    process group of their own.

    Attributes:
        mesh: one-dimensional; the ranks of plans are places in it.
        group: its process group.
        rank: this rank's place in it.
        gradient_group: another process group of the same ranks, for the dense gradients alone:
            these are reduced while backward exchanges vectors in ``group``.
        wire: the precision in which vectors and gradients travel.
        row_gradient_mean: for tables that every rank holds.
    """

    def __init__(self, mesh: DeviceMesh, plans: Iterable[TablePlan], wire: WirePrecision) -> None:
        self.mesh, self.wire = mesh, wire
        self.group = mesh.get_group()
        # A mesh of some processes is made by these alone.
        is_part = mesh.size() < dist.get_world_size()
        self.gradient_group = dist.new_group(mesh.mesh.tolist(), use_local_synchronization=is_part)
        self.rank = mesh.get_local_rank()
        self.row_gradient_mean = row_gradient_mean(self.group)
        self._meshes: dict[tuple[int, ...], DeviceMesh | None] = {tuple(range(mesh.size())): mesh}
        processes = mesh.mesh.tolist()
        for plan in plans:
            ranks = _ranks_of(plan)
            if plan.placement.is_divided and ranks not in self._meshes:
                members = [processes[rank] for rank in ranks]
                self._meshes[ranks] = _mesh_of(members, mesh)

    def holders(self, plan: TablePlan) -> DeviceMesh:
        """The mesh of the ranks that hold a part of a divided table, this one among them."""
        mesh = self._meshes[_ranks_of(plan)]
        assert mesh is not None
        return mesh


def _ranks_of(plan: TablePlan) -> tuple[int, ...]:
    return tuple(shard.rank for shard in plan.shards)
