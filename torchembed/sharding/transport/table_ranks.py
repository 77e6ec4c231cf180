"""The ranks that share a model's tables: their mesh, process groups, wire and transport."""

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
from torchembed.sharding.transport.process_groups import borrow_groups, node_groups, subgroup
from torchembed.sharding.transport.pushed_mean import PushedMean
from torchembed.sharding.transport.rank_exchange import FlatExchange, RankExchange
from torchembed.sharding.transport.two_level_exchange import TwoLevelExchange
from torchembed.sharding.wire import WirePrecision, WireTransport
from torchembed.tables.table import RankMaximum


def num_nodes(mesh: DeviceMesh) -> int:
    """Number of nodes of a mesh; one where it has one dimension."""
    return mesh.mesh.shape[0] if mesh.ndim == 2 else 1


def flat_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """``mesh`` in one dimension, node by node where it has two (nodes, ranks in a node).

    Collective where it has two dimensions.

    Raises:
        ValueError: for more dimensions, ranks that do not increase, or two dimensions over a part
            of all processes.
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
    """A one-dimensional mesh of some processes of ``mesh``, None on the others. Collective.

    Raises:
        ValueError: if ``mesh`` has a part of all processes only.
    """
    # new_group is collective over all processes, those outside the mesh included.
    if mesh.size() < dist.get_world_size():
        raise ValueError(
            f"mesh must hold all {dist.get_world_size()} processes where it has two dimensions or "
            f"some of its ranks only share a table, got {mesh.size()}; start these by themselves"
        )
    everyone = len(processes) == dist.get_world_size()
    group = dist.group.WORLD if everyone else subgroup(processes)
    return None if group is None else DeviceMesh.from_group(group, mesh.device_type)


class TableRanks:
    """The ranks that share a model's tables, as seen by one of them.

    The constructor is collective: where a divided table is held by some of the ranks, these get a
    process group of their own, as do the ranks that hold any table where some hold none. Groups are
    made once, and reused by further shardings over the same ranks.

    Attributes:
        mesh: one-dimensional; the ranks of plans are positions in it.
        group: its process group.
        rank: this rank's position in it.
        gradient_group: another process group of the same ranks, for the dense gradients alone:
            these are reduced while backward exchanges vectors in ``group``.
        sizes_group: another one, on the CPU, for a thread that exchanges sizes ahead.
        exchange: sends ids to the ranks of their rows and vectors back, on several nodes in two
            levels.
        wire: the precision in which vectors and gradients are sent.
        push: the GPUs that store into each other's memory; None without push.
        gradient_mean: averages the model's dense gradients, on several nodes in two levels; None
            before :meth:`average`.
        row_gradient_mean: averages gradients of tables that every rank holds, by
            ``gradient_mean``.
        max_over_holders: the maximum over the ranks that hold tables; None where no two ranks
            hold different ones.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        plans: Sequence[TablePlan],
        wire: WirePrecision,
        *,
        transport: WireTransport = WireTransport.COLLECTIVE,
        num_nodes: int = 1,
        all_hold_tables: bool = False,
    ) -> None:
        """Make or borrow the process groups.

        Args:
            num_nodes: on which the ranks are, node by node.
            all_hold_tables: True if every rank has tables besides those of ``plans``.

        Raises:
            ValueError: if ``transport`` cannot be used between the GPUs of the ranks.
        """
        self.mesh, self.wire = mesh, wire
        self.group = mesh.get_group()
        members = mesh.mesh.tolist()
        # With one rank on each node there is no level within them.
        num_nodes = num_nodes if num_nodes < mesh.size() else 1
        self._groups = borrow_groups(mesh, num_nodes)
        self.gradient_group, self.sizes_group = self._groups.gradients, self._groups.sizes
        self.exchange = self._made_exchange(num_nodes)
        self.rank = mesh.get_local_rank()
        self.push: PushDomain | None = None
        self.gradient_mean: GradientMean | None = None
        self.row_gradient_mean = row_gradient_mean(self._gradient_mean_of_now)
        if transport is WireTransport.PUSH:
            device = torch.device("cuda", torch.cuda.current_device())
            check_peer_access(self.group, device)
            self.push = PushDomain(self.group, device)
        self._meshes: dict[tuple[int, ...], DeviceMesh | None] = {tuple(range(mesh.size())): mesh}
        # Every rank goes through all plans in the same order, also those of tables that it does not
        # hold: making a group is collective over all processes, which would wait for each other for
        # ever in different orders.
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

    def _made_exchange(self, num_nodes: int) -> RankExchange:
        ahead = self._groups.size_nodes
        if ahead is None:
            return FlatExchange(self.group, self.sizes_group)
        return TwoLevelExchange(self.group, node_groups(self.mesh, num_nodes), ahead)

    def average(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        meeting_bytes: float = 0.0,
        sparse: Iterable[nn.Parameter] = (),
    ) -> None:
        """Average the gradients of ``parameters``, and of tables that every rank holds, over ranks
        in every backward from now on.

        Args:
            meeting_bytes: as that of :class:`GradientMean`.
            sparse: those with sparse gradients.
        """
        push = None if self.push is None else PushedMean(self.push, "gradients")
        self.gradient_mean = GradientMean(
            parameters,
            self.gradient_group,
            dtype=self.wire.dense,
            push=push,
            nodes=self._groups.gradient_nodes,
            meeting_bytes=meeting_bytes,
            sparse=sparse,
            borrowed=self._groups,
        )

    def _gradient_mean_of_now(self) -> GradientMean:
        assert self.gradient_mean is not None
        return self.gradient_mean

    def _max_over(self, ranks: tuple[int, ...]) -> RankMaximum | None:
        """The maximum over ``ranks``, None where this rank is not one of several."""
        if ranks not in self._meshes:
            if self.mesh.size() < dist.get_world_size():
                return _refuse_maximum
            processes = self.mesh.mesh.tolist()
            self._meshes[ranks] = _mesh_of([processes[rank] for rank in ranks], self.mesh)
        holders = self._meshes[ranks]
        return None if holders is None or len(ranks) == 1 else max_over(holders.get_group())

    def holders(self, plan: TablePlan) -> DeviceMesh:
        """The mesh of the ranks that hold a part of a divided table, this one among them.

        It is the mesh of all ranks where a row-wise table has fewer rows than ranks, and these
        cannot have a group of their own.
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
    """True if ``plan`` divides rows over all ranks and the last ranks got none."""
    ranks, num_rows = _ranks_of(plan), sum(shard.num_rows for shard in plan.shards)
    return (
        plan.placement is Placement.ROW_WISE
        and ranks == tuple(range(len(ranks)))
        and plan.shards[0].num_rows == -(-num_rows // num_ranks)
    )


def _ranks_of(plan: TablePlan) -> tuple[int, ...]:
    return tuple(shard.rank for shard in plan.shards)
