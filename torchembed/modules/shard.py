"""``shard_embeddings``: spreads a model's tables over ranks, in place."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchembed.modules.collection import Collection
from torchembed.modules.embedding_bag_collection import EmbeddingBagCollection
from torchembed.modules.embedding_collection import EmbeddingCollection
from torchembed.modules.shard_description import describe
from torchembed.modules.sharded_embedding_bag_collection import ShardedEmbeddingBagCollection
from torchembed.modules.sharded_embedding_collection import ShardedEmbeddingCollection
from torchembed.modules.table_module import TableModule
from torchembed.sharding.agreement import check_agreement
from torchembed.sharding.data_parallel import GradientMean
from torchembed.sharding.plan import Placement, ShardingPlan, TablePlan, make_plan, place_table
from torchembed.sharding.ranks import Ranks, flat_mesh, num_nodes
from torchembed.sharding.wire import WirePrecision
from torchembed.tables import TableSpec


def table_specs(model: nn.Module) -> dict[str, TableSpec]:
    """The tables of all unsharded collections in ``model``, by parameter name less ``.weight``."""
    specs = {}
    for path, collection in model.named_modules():
        if isinstance(collection, Collection):
            for table in collection._tables:
                specs[_table_name(path, collection, table.spec.name)] = table.spec
    return specs


def _table_name(path: str, collection: Collection, table: str) -> str:
    container = "embedding_bags" if isinstance(collection, EmbeddingBagCollection) else "embeddings"
    return ".".join(filter(None, (path, container, table)))


def _sharded(
    collection: Collection, plans: list[TablePlan], ranks: Ranks, device: torch.device
) -> nn.Module:
    if isinstance(collection, EmbeddingBagCollection):
        return ShardedEmbeddingBagCollection(collection, plans, ranks, device)
    assert isinstance(collection, EmbeddingCollection)
    return ShardedEmbeddingCollection(collection, plans, ranks, device)


def shard_embeddings(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: ShardingPlan | Mapping[str, Placement | str] | None = None,
    *,
    wire: WirePrecision | None = None,
) -> nn.Module:
    """Spread the tables of ``model`` over the ranks of ``mesh`` and train the rest data-parallel.

    Changes ``model`` in place: each :class:`EmbeddingBagCollection` and
    :class:`EmbeddingCollection` becomes its sharded counterpart, which gives the same results for
    this rank's samples. A collection on the meta device is made here, sharded from the start, its
    rows with the same initial values as unsharded; from a real one this rank's rows are copied.
    All other parameters are copied from the mesh's first rank, and from then on every backward
    leaves in them the mean of the ranks' gradients, as DDP does: the sum over ranks divided by
    their number. A rank without samples contributes zeros. Every rank runs forward and backward
    equally often; batches may differ in size and be empty.

    Make the optimizers afterwards: parameters of tables are new. Collective: every rank of the mesh
    calls it, with the same model, plan and wire; where they differ, all ranks raise and say in
    what, before anything is changed.

    Args:
        model: any module; not itself a collection, since it is changed in place.
        mesh: one-dimensional, for one node; or two-dimensional, ``[nodes, ranks in a node]``. The
            ranks of the plan are its places, node by node. On GPUs the process group must take CPU
            tensors too, as ``init_process_group("cpu:gloo,cuda:nccl")`` makes it.
        plan: a plan, or placements of some tables by name (see
            :func:`~torchembed.sharding.make_plan` for the others).
        wire: the precision in which vectors and their gradients travel; as they are by default.

    Returns:
        ``model``.

    Raises:
        ValueError: for a mesh or plan that does not fit the model, or ranks that disagree.
    """
    flat, wire = flat_mesh(mesh), wire or WirePrecision()
    problem, checked, description = None, None, []
    try:
        checked = _checked_plan(model, mesh, plan)
        description = describe(model, checked, wire)
    except ValueError as error:
        # The others wait for this rank's description, and should hear of it.
        problem, description = error, [f"the error: {error}"]
    check_agreement(description, flat.get_group())
    if problem is not None:
        raise problem
    assert checked is not None
    ranks = Ranks(flat, checked.tables, wire)

    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Collection):
                child_path = f"{path}.{name}" if path else name
                plans = [
                    checked.table(_table_name(child_path, child, table.spec.name))
                    for table in child._tables
                ]
                setattr(module, name, _sharded(child, plans, ranks, device))
    _train_data_parallel(model, ranks)
    return model


def _checked_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: ShardingPlan | Mapping[str, Placement | str] | None,
) -> ShardingPlan:
    """The whole plan for ``model``.

    Raises:
        ValueError: where the plan does not fit the model or the mesh, or the model cannot be
            sharded.
    """
    if isinstance(model, Collection):
        raise ValueError("model must contain collections, not be one; wrap it in a module")
    specs = table_specs(model)
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
    return plan


def _train_data_parallel(model: nn.Module, ranks: Ranks) -> None:
    """Equal values on all ranks, and mean gradients, for whatever is not sharded."""
    group = ranks.group
    sharded = set()
    for module in model.modules():
        if not isinstance(module, TableModule):
            continue
        for table in module._table_set.tables:
            if table.is_sharded:
                sharded.add(table.parameter)
            elif table.gradient_reduction is None:
                table.gradient_reduction = ranks.row_gradient_mean
    replicated = [parameter for parameter in model.parameters() if parameter not in sharded]
    first = dist.get_global_rank(group, 0)
    for tensor in [*(p.data for p in replicated), *model.buffers()]:
        dist.broadcast(tensor, src=first, group=group)
    model._torchembed_gradient_mean = GradientMean(replicated, group)  # type: ignore[assignment]
