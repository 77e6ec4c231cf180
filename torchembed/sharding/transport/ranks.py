"""The ranks that share a model's tables: their mesh, and the meshes of some of them."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchembed.sharding.planning.plan import Placement, TablePlan
from torchembed.sharding.transport.channel import PushDomain
from torchembed.sharding.transport.data_parallel import max_over, row_gradient_mean
from torchembed.sharding.transport.gradient_mean import GradientMean
from torchembed.sharding.transport.peer_access import check_peer_access
from torchembed.sharding.transport.pushed_mean import PushedMean
from torchembed.sharding.transport.rank_groups import borrow_groups, group_of_some
from torchembed.sharding.wire import BUCKET_BYTES, WirePrecision, WireTransport
from torchembed.tables.group import RankMaximum


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
    everyone = len(processes) == dist.get_world_size()
    group = dist.group.WORLD if everyone else group_of_some(processes)
    return None if group is None else DeviceMesh.from_group(group, mesh.device_type)


class Ranks:
    """Every rank that shares a model's tables, as one of them sees it.

    Making one is collective: where a divided table is held by some of the ranks, these get a
    process group of their own, as do the ranks that hold any table where some hold none. Groups are
    made once, and used by further shardings over the same ranks.

    Attributes:
        mesh: one-dimensional; the ranks of plans are places in it.
        group: its process group.
        rank: this rank's place in it.
        gradient_group: another process group of the same ranks, for the dense gradients alone:
            these are reduced while backward exchanges vectors in ``group``.
        sizes_group: another one, through the CPU, for a thread that announces ids ahead.
        wire: the precision in which vectors and gradients travel.
        push: the GPUs that store into each other's memory; None where none do.
        gradient_mean: of the dense gradients of the model that is sharded; made last.
        row_gradient_mean: for tables that every rank holds; needs that one.
        max_over_holders: of all tables; None where no two ranks hold different ones.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        plans: Sequence[TablePlan],
        wire: WirePrecision,
        *,
        transport: WireTransport = WireTransport.COLLECTIVE,
        all_hold_tables: bool = False,
    ) -> None:
        """``all_hold_tables``: every rank has others than those of ``plans``.

        Raises:
            ValueError: where ``transport`` cannot be taken between the GPUs of the ranks.
        """
        self.mesh, self.wire = mesh, wire
        self.group = mesh.get_group()
        members = mesh.mesh.tolist()
        self._groups = borrow_groups(mesh)
        self.gradient_group, self.sizes_group = self._groups.gradients, self._groups.sizes
        self.rank = mesh.get_local_rank()
        self.push: PushDomain | None = None
        self.gradient_mean: GradientMean | None = None
        self.row_gradient_mean = row_gradient_mean(self._gradient_mean_of_now)
        if transport is WireTransport.PUSH:
            device = torch.device("cuda", torch.cuda.current_device())
            check_peer_access(self.group, device)
            self.push = PushDomain(self.group, device)
        self._meshes: dict[tuple[int, ...], DeviceMesh | None] = {tuple(range(mesh.size())): mesh}
        for plan in plans:
            ranks = _ranks_of(plan)
            if plan.placement.is_divided and ranks not in self._meshes:
                if mesh.size() < dist.get_world_size() and _leaves_out_empty(plan, mesh.size()):
                    continue
                self._meshes[ranks] = _mesh_of([members[rank] for rank in ranks], mesh)
        self.max_over_holders: RankMaximum | None = None
        if any(plan.placement is not Placement.DATA_PARALLEL for plan in plans):
            held = {shard.rank for plan in plans for shard in plan.shards}
            ranks = tuple(range(mesh.size()) if all_hold_tables else sorted(held))
            self.max_over_holders = self._max_over(ranks)

    def average(
        self, parameters: Iterable[nn.Parameter], *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """From now on every backward leaves the mean over ranks in the gradients of
        ``parameters``, and in those of the tables that every rank holds."""
        push = None if self.push is None else PushedMean(self.push, "gradients")
        self.gradient_mean = GradientMean(
            parameters,
            self.gradient_group,
            dtype=self.wire.dense,
            push=push,
            bucket_bytes=bucket_bytes,
            held=self._groups,
        )

    def _gradient_mean_of_now(self) -> GradientMean:
        assert self.gradient_mean is not None
        return self.gradient_mean

    def _max_over(self, ranks: tuple[int, ...]) -> RankMaximum | None:
        if ranks not in self._meshes:
            if self.mesh.size() < dist.get_world_size():
                return _refuse_maximum
            processes = self.mesh.mesh.tolist()
            self._meshes[ranks] = _mesh_of([processes[rank] for rank in ranks], self.mesh)
        holders = self._meshes[ranks]
        return None if holders is None or len(ranks) == 1 else max_over(holders.get_group())

    def holders(self, plan: TablePlan) -> DeviceMesh:
        """The mesh of the ranks that hold a part of a divided table, this one among them.

        Where a row-wise table has fewer rows than ranks, and these can have no group of their own,
        it is that of all.
        """
        mesh = self._meshes.get(_ranks_of(plan), self.mesh)
        assert mesh is not None
        return mesh


def _refuse_maximum(_: Tensor) -> None:
    raise RuntimeError(
        "GradScaler needs tables on every rank of a mesh that holds some of all processes; place "
        "one of them row-wise, or start the ranks of the mesh by themselves"
    )


def _leaves_out_empty(plan: TablePlan, num_ranks: int) -> bool:
    """Whether ``plan`` divides rows over all ranks, of which the last ones got none."""
    ranks, num_rows = _ranks_of(plan), sum(shard.num_rows for shard in plan.shards)
    return (
        plan.placement is Placement.ROW_WISE
        and ranks == tuple(range(len(ranks)))
        and plan.shards[0].num_rows == -(-num_rows // num_ranks)
    )


def _ranks_of(plan: TablePlan) -> tuple[int, ...]:
    return tuple(shard.rank for shard in plan.shards)
