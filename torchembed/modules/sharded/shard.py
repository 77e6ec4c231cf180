"""``shard_embeddings``: spreads a model's tables over ranks, in place."""

import logging
from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchembed.core.ranks.agreement import check_agreement
from torchembed.modules.collection import Collection
from torchembed.modules.inside_ddp import ignore_tables
from torchembed.modules.sharded.dense_use import dense_parameters
from torchembed.modules.sharded.inside_fsdp import leave_to_torchembed
from torchembed.modules.sharded.model_plan import (
    check_mesh,
    checked_plan,
    device_of,
    planner_lines,
    single_spec,
    single_tables,
    table_name,
    table_uses,
    with_topology,
)
from torchembed.modules.sharded.replicas import (
    check_parameters,
    copy_from_first,
    with_sparse_gradients,
)
from torchembed.modules.sharded.shard_description import describe
from torchembed.modules.sharded.sharded_embedding_bag_collection import (
    ShardedEmbeddingBagCollection,
)
from torchembed.modules.sharded.sharded_embedding_collection import ShardedEmbeddingCollection
from torchembed.modules.sharded.sharded_single_table import ShardedSingleTable
from torchembed.modules.single_table import SingleTable
from torchembed.modules.table_module import TableModule
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.optim.fused import FusedOptimizer
from torchembed.sharding.planning.bucket_size import bytes_of_a_meeting
from torchembed.sharding.planning.memory_budget import check_hosts, memory_budget
from torchembed.sharding.planning.plan import (
    Placement,
    ShardingPlan,
    TablePlan,
)
from torchembed.sharding.planning.plan_report import PlanReport
from torchembed.sharding.planning.planner import Planner, check_optimizer_class
from torchembed.sharding.planning.topology import Topology, available_host_bytes, free_bytes
from torchembed.sharding.transport.gradient_mean import most_bytes_of_a_bucket
from torchembed.sharding.transport.peer_access import check_transport
from torchembed.sharding.transport.pushed_mean import most_bytes_of_means
from torchembed.sharding.transport.table_ranks import TableRanks, flat_mesh, num_nodes
from torchembed.sharding.wire import WirePrecision, WireTransport

_logger = logging.getLogger(__name__)


def _sharded(
    collection: Collection, plans: list[TablePlan], ranks: TableRanks, device: torch.device
) -> nn.Module:
    is_pooled = collection.description.is_pooled
    kind = ShardedEmbeddingBagCollection if is_pooled else ShardedEmbeddingCollection
    return kind.of(collection, plans, ranks, device)


def shard_embeddings(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: ShardingPlan | Planner | Mapping[str, Placement | str] | Literal["auto"] | None = None,
    *,
    wire: WirePrecision | None = None,
    transport: WireTransport = WireTransport.COLLECTIVE,
    optimizer: type[FusedOptimizer] | None = None,
) -> nn.Module:
    """Shard the tables of ``model`` over the ranks of ``mesh`` and train the rest data-parallel.

    Changes ``model`` in place: each :class:`EmbeddingBagCollection`, :class:`EmbeddingCollection`,
    :class:`EmbeddingBag` and :class:`Embedding` becomes its sharded counterpart, which returns the
    same results for this rank's samples. For a module on the meta device each rank allocates its
    own shards only, with the initial rows of an unsharded module; from other modules each rank
    copies its rows. Modules of one table take the first rank's seed and rows. They stay whole on
    every rank if they are planned ``data_parallel``, share their weight with another module, are of
    a derived class, or hold float64 rows.

    All other parameters are copied from the mesh's first rank. From then on every backward leaves
    in them the mean of the ranks' gradients, as DDP does: the sum over ranks divided by their
    number. A rank without samples contributes zeros. Every rank must run forward and backward
    equally often; batches may differ in size and be empty.

    Make the optimizers afterwards: parameters of tables are new, and an optimizer with the old ones
    is refused. Collective: every rank of the mesh calls it with the same model, plan, wire and
    transport; if they differ, all ranks raise and name the difference, before anything is changed.
    Before memory is allocated, the first rank logs at level ``INFO`` the memory budget of the rank
    that has the least to spare.

    Args:
        model: any module; not itself a collection, since it is changed in place.
        mesh: one-dimensional, for one node; or two-dimensional, ``[nodes, ranks in a node]``. The
            ranks of the plan are its places, node by node. On GPUs the process group must take CPU
            tensors too, as ``init_process_group("cpu:gloo,cuda:nccl")`` makes it.
        plan: a plan; or, to place every table by cost, a planner or ``"auto"``, which is
            ``Planner()`` (see :func:`plan_embeddings`); or placements of some tables by name, as in
            ``{"tables.embedding_bags.user": "row_wise"}`` (see
            :func:`~torchembed.sharding.make_plan` for the others). Tables that the plan places in
            host memory or on disk are created there.
        wire: the precision in which vectors and their gradients are exchanged; their own by
            default.
        transport: the exchange of vectors and gradients. ``WireTransport.PUSH`` is for the GPUs of
            one node; results are the same.
        optimizer: the class of the tables' optimizer, unless a planner has it, so that its state
            counts in the memory that is checked.

    Returns:
        ``model``.

    Raises:
        TypeError: where ``mesh`` is not a ``DeviceMesh``, ``wire`` no ``WirePrecision``, or
            ``optimizer`` no class of an optimizer of tables.
        RuntimeError: where there is no process group.
        ValueError: for a mesh or plan that does not fit the model; a sparse, nested or complex
            parameter; a collection of a derived class; or ranks that disagree, also where planning
            fails on some of them only; where the tables do not fit into memory, as far as it is
            known: without a planner, that of rows, the dense part and, given ``optimizer``, its
            state; for ``PUSH`` where GPUs cannot store into each other's memory, and for a wire
            that it cannot send in.
    """
    check_mesh(mesh)
    flat, wire = flat_mesh(mesh), wire or WirePrecision()
    problem, checked, report, description = None, None, None, []
    if plan == "auto":
        plan = Planner()
    planner = plan if isinstance(plan, Planner) else None
    # A planner without a topology gathers the ranks' memory. That collective would hang if some
    # rank had no planner, so that the ranks agree on it first.
    check_agreement({"the planner": planner_lines(planner)}, flat.get_group())
    # An error on this rank alone must not leave the others in a collective: it goes into the lines
    # that the ranks compare, and is raised after them.
    try:
        check_parameters(model)
        if optimizer is not None:
            check_optimizer_class(optimizer)
        if planner is not None:
            plan = with_topology(planner, mesh, flat)
        checked, report = checked_plan(model, mesh, plan, wire, transport)
        check_transport(transport, wire, mesh, num_nodes(mesh))
        description = describe(model, checked, wire, transport)
    except Exception as error:  # noqa: BLE001 - raised below, once all ranks know of it
        problem, description = error, [f"the error: {type(error).__name__}: {error}"]
    check_agreement({"what is sharded, and how": description}, flat.get_group())
    if problem is not None:
        raise problem
    assert checked is not None
    rule = None if optimizer is None else UpdateRule(kind=optimizer.kind)
    _check_memory(model, checked, report, rule, flat, transport)
    meeting_bytes = _bytes_of_a_meeting(checked, report, flat)
    singles = single_tables(model)
    of_plan = set(singles.values())
    has_other_tables = any(
        isinstance(module, TableModule)
        and not isinstance(module, Collection)
        and module not in of_plan
        for module in model.modules()
    )
    ranks = TableRanks(
        flat,
        checked.tables,
        wire,
        transport=transport,
        num_nodes=checked.num_nodes,
        all_hold_tables=has_other_tables,
    )

    device = device_of(mesh)
    for module in model.modules():
        if isinstance(module, TableModule):
            module.write_back()
    for path, collection in list(model.named_modules()):
        if isinstance(collection, Collection):
            plans = [
                checked.table(table_name(path, collection, table.spec.name))
                for table in collection.table_set.tables
            ]
            _replace(model, collection, _sharded(collection, plans, ranks, device))
    _agree_on_seeds(model, ranks)
    _shard_singles(model, singles, checked, ranks, device)
    _train_data_parallel(model, ranks, meeting_bytes)
    return model


def _bytes_of_a_meeting(plan: ShardingPlan, report: PlanReport | None, mesh: DeviceMesh) -> float:
    """:func:`bytes_of_a_meeting` of the ranks. Collective for several nodes where no planner's
    ``report`` knows their topology."""
    if report is not None:
        return bytes_of_a_meeting(report.topology)
    if plan.num_nodes == 1:
        return 0.0
    group, device = mesh.get_group(), device_of(mesh)
    return bytes_of_a_meeting(Topology.of_group(group, device, num_nodes=plan.num_nodes))


def _agree_on_seeds(model: nn.Module, ranks: TableRanks) -> None:
    """Give modules of one table the seeds that they have on the first rank, or those that every
    rank holds would round differently."""
    modules = [module for module in model.modules() if isinstance(module, SingleTable)]
    if modules:
        seeds = [module.table_set.tables[0].spec.seed for module in modules]
        first = dist.get_global_rank(ranks.group, 0)
        dist.broadcast_object_list(seeds, src=first, group=ranks.group)
        for module, seed in zip(modules, seeds, strict=True):
            module.reseed(seed)


def _shard_singles(
    model: nn.Module,
    singles: Mapping[str, SingleTable],
    plan: ShardingPlan,
    ranks: TableRanks,
    device: torch.device,
) -> None:
    """Replace the modules of one table, by name, whose tables ``plan`` shards."""
    first = dist.get_global_rank(ranks.group, 0)
    for name, module in singles.items():
        of_module = plan.table(name)
        if of_module.placement is Placement.DATA_PARALLEL:
            continue
        if not module.weight.is_meta and module.dynamic is None:
            # Ranks may have drawn their own rows: the first rank's count, as in DDP.
            for rows in module.weight.data.split(_ROWS_AT_ONCE):
                on_device = rows.to(device)
                dist.broadcast(on_device, src=first, group=ranks.group)
                if on_device is not rows:
                    rows.copy_(on_device)
        spec = single_spec(module)
        made = ShardedSingleTable.of(module, name, spec, of_module, ranks, device)
        _replace(model, module, made)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` where ``model`` has ``old``, under each of its names."""
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is old:
                setattr(module, name, new)


_ROWS_AT_ONCE = 1 << 20
"""Rows that are sent at a time, and of tables in host memory are on the device at once."""
_DENSE_COPIES = 3
"""Buffers as large as the dense parameters: gradients and, with Adam, two states."""


def _check_memory(
    model: nn.Module,
    plan: ShardingPlan,
    report: PlanReport | None,
    rule: UpdateRule | None,
    mesh: DeviceMesh,
    transport: WireTransport,
) -> None:
    """Log the budget of the rank with the least memory to spare.

    Collective. Raises ``ValueError`` on all ranks where that budget exceeds its memory.
    """
    uses = table_uses(model)
    dense = dense_parameters(model, uses)
    # Means over several nodes are taken in a copy of the gradients.
    num_copies = _DENSE_COPIES + (plan.num_nodes > 1)
    dense_bytes = num_copies * sum(p.numel() * p.element_size() for p in dense)
    if transport is WireTransport.PUSH:
        replicated = [t.table for t in plan.tables if t.placement is Placement.DATA_PARALLEL]
        numbers = sum(uses[name].spec.num_rows * (uses[name].spec.dim + 1) for name in replicated)
        bucket = most_bytes_of_a_bucket((p.numel() for p in dense), numbers)
        dense_bytes += most_bytes_of_means(bucket)
    device = device_of(mesh)
    mine = memory_budget(
        plan,
        uses,
        mesh.get_local_rank(),
        report=report,
        rule=rule,
        dense_bytes=dense_bytes,
        free_bytes=free_bytes(device),
        host_free_bytes=available_host_bytes(),
        is_on_host=device.type == "cpu",
    )
    budgets = [mine] * mesh.size()
    dist.all_gather_object(budgets, mine, group=mesh.get_group())
    tightest = max(budgets, key=lambda budget: budget.needed_bytes / budget.free_bytes)
    tightest.check()
    check_hosts(budgets)
    if mine.rank == 0:
        _logger.info("%s", tightest)


def _train_data_parallel(model: nn.Module, ranks: TableRanks, meeting_bytes: float) -> None:
    """Make parameters that are not sharded equal on all ranks, and average their gradients.

    Args:
        meeting_bytes: as that of :class:`GradientMean`.
    """
    sharded = set()
    for module in model.modules():
        if not isinstance(module, TableModule):
            continue
        for table in module.table_set.tables:
            if table.is_sharded:
                sharded.add(table.parameter)
            elif table.gradient_reduction is None:
                table.gradient_reduction = ranks.row_gradient_mean
                table.max_over_holders = ranks.max_over_holders
    replicated = [parameter for parameter in model.parameters() if parameter not in sharded]
    # Ranks may have drawn their own initial values: the first rank's count, as in DDP.
    copy_from_first([p.data for p in replicated], model, ranks.group)
    ranks.average(replicated, meeting_bytes=meeting_bytes, sparse=with_sparse_gradients(model))
    ignore_tables(model)
    leave_to_torchembed(model)
