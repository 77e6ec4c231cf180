"""``shard_embeddings``: spreads a model's tables over ranks, in place."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchembed.core.agreement import check_agreement
from torchembed.modules.collection import Collection
from torchembed.modules.dense_use import dense_parameters, dense_use
from torchembed.modules.earlier_optimizers import check_no_optimizer_has
from torchembed.modules.inside_ddp import ignore_tables
from torchembed.modules.shard_description import describe
from torchembed.modules.sharded_embedding_bag_collection import ShardedEmbeddingBagCollection
from torchembed.modules.sharded_embedding_collection import ShardedEmbeddingCollection
from torchembed.modules.table_module import TableModule
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.optim.fused import FusedOptimizer
from torchembed.sharding.planning.costs import TableUse
from torchembed.sharding.planning.memory_budget import memory_budget
from torchembed.sharding.planning.plan import (
    Placement,
    ShardingPlan,
    TablePlan,
    make_plan,
    place_table,
)
from torchembed.sharding.planning.plan_report import PlanReport
from torchembed.sharding.planning.planner import Planner
from torchembed.sharding.planning.topology import Topology, free_bytes
from torchembed.sharding.transport.gradient_mean import most_bytes_of_a_bucket
from torchembed.sharding.transport.peer_access import check_transport
from torchembed.sharding.transport.pushed_mean import most_bytes_of_means
from torchembed.sharding.transport.table_ranks import TableRanks, flat_mesh, num_nodes
from torchembed.sharding.wire import WirePrecision, WireTransport
from torchembed.tables import TableSpec

_logger = logging.getLogger(__name__)


def table_specs(model: nn.Module) -> dict[str, TableSpec]:
    """The tables of all unsharded collections in ``model``, by parameter name less ``.weight``."""
    return {name: use.spec for name, use in table_uses(model).items()}


def table_uses(model: nn.Module) -> dict[str, TableUse]:
    """The tables of all unsharded collections in ``model``, by parameter name less ``.weight``, and
    how they are used: the input of a :class:`~torchembed.sharding.Planner`."""
    uses = {}
    for path, collection in model.named_modules():
        if isinstance(collection, Collection):
            description = collection.description
            tables = collection.table_set.tables
            for table, config in zip(tables, description.configs, strict=True):
                uses[_table_name(path, collection, table.spec.name)] = TableUse(
                    spec=table.spec,
                    features=config.feature_names,
                    pooled=description.is_pooled,
                    output_dtype=description.output_dtype,
                )
    return uses


def _table_name(path: str, collection: Collection, table: str) -> str:
    """The name of a table's parameter in the model, less ``.weight``."""
    return ".".join(filter(None, (path, collection.description.container, table)))


def _sharded(
    collection: Collection, plans: list[TablePlan], ranks: TableRanks, device: torch.device
) -> nn.Module:
    is_pooled = collection.description.is_pooled
    kind = ShardedEmbeddingBagCollection if is_pooled else ShardedEmbeddingCollection
    return kind.of(collection, plans, ranks, device)


def plan_embeddings(
    model: nn.Module,
    planner: Planner | None = None,
    mesh: DeviceMesh | None = None,
    *,
    wire: WirePrecision | None = None,
    transport: WireTransport = WireTransport.COLLECTIVE,
) -> PlanReport:
    """Plan the tables of ``model`` and predict the plan's cost; nothing is changed or allocated.

    ``print`` the result, and pass its ``plan`` to :func:`shard_embeddings`.

    Args:
        planner: ``Planner()`` by default.
        mesh: the ranks that the plan is for, as for :func:`shard_embeddings`. Where the planner
            has no topology, the call is collective and takes the memory that the ranks have free
            now; where it has one, no mesh is needed.
        wire, transport: as for :func:`shard_embeddings`.

    Raises:
        ValueError: where neither mesh nor topology is given, or they have different ranks; where
            the tables do not fit; for constraints that cannot be held.
    """
    planner = planner or Planner()
    if mesh is not None:
        _check_mesh(mesh)
        planner = _with_topology(planner, mesh, flat_mesh(mesh))
        _check_topology(planner, mesh)
    return _planned(model, planner, wire, transport)


def _planned(
    model: nn.Module, planner: Planner, wire: WirePrecision | None, transport: WireTransport
) -> PlanReport:
    """The report of a planner that has a topology."""
    uses = table_uses(model)
    dense = dense_use(model, uses, planner.autocast)
    return planner.plan(uses, wire=wire, transport=transport, dense=dense)


def _with_topology(planner: Planner, mesh: DeviceMesh, flat: DeviceMesh) -> Planner:
    """``planner``, with the topology of the mesh where it has none, which is collective."""
    if planner.topology is not None:
        return planner
    topology = Topology.of_group(flat.get_group(), _device(mesh), num_nodes=num_nodes(mesh))
    return dataclasses.replace(planner, topology=topology)


def _planner_lines(planner: Planner | None) -> list[str]:
    """Settings of the planner, which must be the same on all ranks, as lines of text."""
    if planner is None:
        return ["no planner"]
    settings = [f"{f.name}={getattr(planner, f.name)}" for f in dataclasses.fields(planner)]
    return ["a planner", *settings]


def _check_topology(planner: Planner, mesh: DeviceMesh) -> None:
    topology = planner.topology
    assert topology is not None
    nodes = num_nodes(mesh)
    if (topology.num_nodes, topology.num_ranks) != (nodes, mesh.size()):
        raise ValueError(
            f"topology of the planner has {topology.num_nodes} node(s) of "
            f"{topology.ranks_per_node} rank(s), but mesh has {nodes} of {mesh.size() // nodes}"
        )


def _check_mesh(mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {mesh!r}; make one by "
            "init_device_mesh(device_type, (world_size,)), after init_process_group()"
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "mesh has no process group; call torch.distributed.init_process_group() before, and "
            "start the ranks by torchrun"
        )


def _device(mesh: DeviceMesh) -> torch.device:
    """This rank's device."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


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

    Changes ``model`` in place: each :class:`EmbeddingBagCollection` and
    :class:`EmbeddingCollection` becomes its sharded counterpart, which returns the same results for
    this rank's samples. A collection on the meta device is allocated here, this rank's
    shards only, with the initial values of an unsharded one; from a real one this rank's rows are
    copied.
    All other parameters are copied from the mesh's first rank, and from then on every backward
    leaves in them the mean of the ranks' gradients, as DDP does: the sum over ranks divided by
    their number. A rank without samples contributes zeros. Every rank runs forward and backward
    equally often; batches may differ in size and be empty.

    Make the optimizers afterwards: parameters of tables are new, and an optimizer that has the old
    ones is refused. Collective: every rank of the mesh
    calls it, with the same model, plan, wire and transport; where they differ, all ranks raise and
    name the difference, before anything is changed. The first rank logs the memory budget of the
    rank with the least memory to spare, at the level ``INFO``, before it is allocated.

    Args:
        model: any module; not itself a collection, since it is changed in place.
        mesh: one-dimensional, for one node; or two-dimensional, ``[nodes, ranks in a node]``. The
            ranks of the plan are its places, node by node. On GPUs the process group must take CPU
            tensors too, as ``init_process_group("cpu:gloo,cuda:nccl")`` makes it.
        plan: a plan; a planner, or ``"auto"`` for ``Planner()``, to place every table by cost (see
            :func:`plan_embeddings`); or placements of some tables by name (see
            :func:`~torchembed.sharding.make_plan` for the others).
        wire: the precision in which vectors and their gradients are exchanged; their own by
            default.
        transport: the exchange of vectors and gradients. ``WireTransport.PUSH`` is for the GPUs of
            one node; results are the same.
        optimizer: of the tables, where it is known and no planner has it: its state then counts in
            the memory that is checked.

    Returns:
        ``model``.

    Raises:
        TypeError: where ``mesh`` is not a ``DeviceMesh``.
        RuntimeError: where there is no process group.
        ValueError: for a mesh or plan that does not fit the model, or ranks that disagree, also
            where planning fails on some of them only; where the tables do not fit into memory,
            as far as it is known: without a planner, that of rows, the dense part and, given
            ``optimizer``, its state; for ``PUSH`` where GPUs cannot store into each other's memory.
    """
    _check_mesh(mesh)
    flat, wire = flat_mesh(mesh), wire or WirePrecision()
    problem, checked, report, description = None, None, None, []
    if plan == "auto":
        plan = Planner()
    planner = plan if isinstance(plan, Planner) else None
    # A planner without a topology gathers the ranks' memory. That collective would hang if some
    # rank had no planner, so that the ranks agree on it first.
    check_agreement({"the planner": _planner_lines(planner)}, flat.get_group())
    # An error on this rank alone must not leave the others in a collective: it goes into the lines
    # that the ranks compare, and is raised after them.
    try:
        if planner is not None:
            plan = _with_topology(planner, mesh, flat)
        checked, report = _checked_plan(model, mesh, plan, wire, transport)
        check_transport(transport, mesh, num_nodes(mesh))
        description = describe(model, checked, wire, transport)
    except Exception as error:  # noqa: BLE001 - raised below, once all ranks know of it
        problem, description = error, [f"the error: {type(error).__name__}: {error}"]
    check_agreement({"what is sharded, and how": description}, flat.get_group())
    if problem is not None:
        raise problem
    assert checked is not None
    rule = None if optimizer is None else UpdateRule(kind=optimizer.kind)
    _check_memory(model, checked, report, rule, flat, transport)
    has_other_tables = any(
        isinstance(module, TableModule) and not isinstance(module, Collection)
        for module in model.modules()
    )
    ranks = TableRanks(
        flat, checked.tables, wire, transport=transport, all_hold_tables=has_other_tables
    )

    device = _device(mesh)
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Collection):
                child_path = f"{path}.{name}" if path else name
                plans = [
                    checked.table(_table_name(child_path, child, table.spec.name))
                    for table in child.table_set.tables
                ]
                setattr(module, name, _sharded(child, plans, ranks, device))
    _train_data_parallel(model, ranks)
    return model


def _checked_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: ShardingPlan | Planner | Mapping[str, Placement | str] | None,
    wire: WirePrecision,
    transport: WireTransport,
) -> tuple[ShardingPlan, PlanReport | None]:
    """The whole plan for ``model``, and a planner's report of it.

    Raises:
        ValueError: where the plan does not fit the model or the mesh, or the model cannot be
            sharded.
    """
    if isinstance(model, Collection):
        raise ValueError("model must contain collections, not be one; wrap it in a module")
    specs, report = table_specs(model), None
    parameters = dict(model.named_parameters())
    check_no_optimizer_has({name: parameters[f"{name}.weight"] for name in specs})
    if isinstance(plan, str):
        raise ValueError(
            f'plan must be "auto", a Planner, a ShardingPlan or placements by table, got {plan!r}'
        )
    if isinstance(plan, Planner):
        _check_topology(plan, mesh)
        report = _planned(model, plan, wire, transport)
        plan = report.plan
    if not isinstance(plan, ShardingPlan):
        plan = make_plan(specs, mesh.size(), plan, num_nodes=num_nodes(mesh))
    planned = [table_plan.table for table_plan in plan.tables]
    if sorted(planned) != sorted(specs):
        raise ValueError(f"plan must hold the tables {sorted(specs)}, got {sorted(planned)}")
    if plan.num_ranks != mesh.size():
        raise ValueError(f"plan is for {plan.num_ranks} ranks, but mesh has {mesh.size()}")
    if plan.num_nodes != num_nodes(mesh):
        raise ValueError(
            f"plan is for {plan.num_nodes} nodes, but mesh has {num_nodes(mesh)}; a mesh of "
            "several has two dimensions, nodes and ranks in a node"
        )
    for given in plan.tables:
        ranks, spec = [shard.rank for shard in given.shards], specs[given.table]
        made = place_table(given.table, spec, given.placement, ranks)
        if given != made or (
            given.placement is Placement.DATA_PARALLEL and len(ranks) < mesh.size()
        ):
            raise ValueError(
                f"plan of table {given.table} must divide {spec.num_rows} rows of {spec.dim} "
                f"columns as place_table does, got {given}"
            )
    meta = [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_meta and name.removesuffix(".weight") not in specs
    ]
    if meta:
        raise ValueError(
            f"parameters {meta} are on the meta device; make them real before sharding"
        )
    return plan, report


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
    dense_bytes = _DENSE_COPIES * sum(p.numel() * p.element_size() for p in dense)
    if transport is WireTransport.PUSH:
        replicated = [t.table for t in plan.tables if t.placement is Placement.DATA_PARALLEL]
        numbers = sum(uses[name].spec.num_rows * (uses[name].spec.dim + 1) for name in replicated)
        bucket = most_bytes_of_a_bucket((p.numel() for p in dense), numbers)
        dense_bytes += most_bytes_of_means(bucket)
    mine = memory_budget(
        plan,
        uses,
        mesh.get_local_rank(),
        report=report,
        rule=rule,
        dense_bytes=dense_bytes,
        free_bytes=free_bytes(_device(mesh)),
    )
    budgets = [mine] * mesh.size()
    dist.all_gather_object(budgets, mine, group=mesh.get_group())
    tightest = max(budgets, key=lambda budget: budget.needed_bytes / budget.free_bytes)
    tightest.check()
    if mine.rank == 0:
        _logger.info("%s", tightest)


def _train_data_parallel(model: nn.Module, ranks: TableRanks) -> None:
    """Make parameters that are not sharded equal on all ranks, and average their gradients."""
    group = ranks.group
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
    first = dist.get_global_rank(group, 0)
    for tensor in [*(p.data for p in replicated), *model.buffers()]:
        dist.broadcast(tensor, src=first, group=group)
    ranks.average(replicated)
    ignore_tables(model)
