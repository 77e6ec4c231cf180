"""``shard_embeddings``: spreads a model's tables over ranks, in place."""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchembed.modules.collection import Collection
from torchembed.modules.embedding_bag_collection import EmbeddingBagCollection
from torchembed.modules.embedding_collection import EmbeddingCollection
from torchembed.modules.sharded_embedding_bag_collection import ShardedEmbeddingBagCollection
from torchembed.modules.sharded_embedding_collection import ShardedEmbeddingCollection
from torchembed.modules.table_module import TableModule
from torchembed.sharding.costs import TableUse
from torchembed.sharding.data_parallel import GradientMean, row_gradient_mean
from torchembed.sharding.plan import Placement, ShardingPlan, TablePlan, make_plan
from torchembed.sharding.plan_report import PlanReport
from torchembed.sharding.planner import Planner
from torchembed.sharding.topology import Topology
from torchembed.tables import TableSpec


def table_specs(model: nn.Module) -> dict[str, TableSpec]:
    """The tables of all unsharded collections in ``model``, by parameter name less ``.weight``."""
    return {name: use.spec for name, use in table_uses(model).items()}


def table_uses(model: nn.Module) -> dict[str, TableUse]:
    """The tables of all unsharded collections in ``model``, by parameter name less ``.weight``, and
    how they are used: what a :class:`~torchembed.sharding.Planner` plans for."""
    uses = {}
    for path, collection in model.named_modules():
        if isinstance(collection, EmbeddingBagCollection | EmbeddingCollection):
            for table, config in zip(collection._tables, collection._configs, strict=True):
                uses[_table_name(path, collection, table.spec.name)] = TableUse(
                    spec=table.spec,
                    features=config.feature_names,
                    pooled=isinstance(collection, EmbeddingBagCollection),
                    output_dtype=collection._output_dtype,
                )
    return uses


def _table_name(path: str, collection: Collection, table: str) -> str:
    container = "embedding_bags" if isinstance(collection, EmbeddingBagCollection) else "embeddings"
    return ".".join(filter(None, (path, container, table)))


def _sharded(
    collection: Collection, plans: list[TablePlan], mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    if isinstance(collection, EmbeddingBagCollection):
        return ShardedEmbeddingBagCollection(collection, plans, mesh, device)
    assert isinstance(collection, EmbeddingCollection)
    return ShardedEmbeddingCollection(collection, plans, mesh, device)


def plan_embeddings(
    model: nn.Module, planner: Planner | None = None, mesh: DeviceMesh | None = None
) -> PlanReport:
    """Plan the tables of ``model`` and say what the plan costs; nothing is changed or allocated.

    ``print`` the result, and pass its ``plan`` to :func:`shard_embeddings`.

    Args:
        planner: ``Planner()`` by default.
        mesh: whose ranks, with their memory now, the plan is for: collective then. Not needed where
            the planner has a topology.

    Raises:
        ValueError: where neither mesh nor topology is given, or they have different ranks; where
            the tables do not fit; for constraints that cannot be held.
    """
    planner = planner or Planner()
    topology = planner.topology
    if mesh is not None:
        if topology is None:
            topology = Topology.of_group(mesh.get_group(), _device(mesh))
        if (topology.num_nodes, topology.ranks_per_node) != (1, mesh.size()):
            raise ValueError(
                f"topology of the planner has {topology.num_nodes} node(s) of "
                f"{topology.ranks_per_node} rank(s), but mesh has one of {mesh.size()}"
            )
    return planner.plan(table_uses(model), topology)


def _device(mesh: DeviceMesh) -> torch.device:
    """This rank's device."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def shard_embeddings(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: ShardingPlan | Planner | Mapping[str, Placement | str] | Literal["auto"] | None = None,
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
    calls it, with the same model and plan.

    Args:
        model: any module; not itself a collection, since it is changed in place.
        mesh: one-dimensional; on GPUs its process group must take CPU tensors too, as
            ``init_process_group("cpu:gloo,cuda:nccl")`` makes it.
        plan: a plan; a planner, or ``"auto"`` for ``Planner()``, to place every table by cost (see
            :func:`plan_embeddings`); or placements of some tables by name (see
            :func:`~torchembed.sharding.make_plan` for the others).

    Returns:
        ``model``.

    Raises:
        ValueError: for a mesh or plan that does not fit the model, and where a planner finds that
            the tables do not fit into memory.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, got {mesh.ndim}; take a slice of it")
    if isinstance(model, Collection):
        raise ValueError("model must contain collections, not be one; wrap it in a module")
    specs = table_specs(model)
    if plan == "auto":
        plan = Planner()
    if isinstance(plan, Planner):
        plan = plan_embeddings(model, plan, mesh).plan
    if isinstance(plan, str):
        raise ValueError(
            f'plan must be "auto", a Planner, a ShardingPlan or placements by table, got {plan!r}'
        )
    if not isinstance(plan, ShardingPlan):
        plan = make_plan(specs, mesh.size(), plan)
    planned = [table_plan.table for table_plan in plan.tables]
    if sorted(planned) != sorted(specs):
        raise ValueError(f"plan must hold the tables {sorted(specs)}, got {sorted(planned)}")
    if plan.num_ranks != mesh.size():
        raise ValueError(f"plan is for {plan.num_ranks} ranks, but mesh has {mesh.size()}")
    meta = [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_meta and name.removesuffix(".weight") not in specs
    ]
    if meta:
        raise ValueError(
            f"parameters {meta} are on the meta device; make them real before sharding"
        )

    device = _device(mesh)
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Collection):
                child_path = f"{path}.{name}" if path else name
                plans = [
                    plan.table(_table_name(child_path, child, table.spec.name))
                    for table in child._tables
                ]
                setattr(module, name, _sharded(child, plans, mesh, device))
    _train_data_parallel(model, mesh)
    return model


def _train_data_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Equal values on all ranks, and mean gradients, for whatever is not sharded."""
    group = mesh.get_group()
    reduction = row_gradient_mean(group)
    sharded = set()
    for module in model.modules():
        if not isinstance(module, TableModule):
            continue
        for table in module._table_set.tables:
            if table.is_sharded:
                sharded.add(table.parameter)
            elif table.gradient_reduction is None:
                table.gradient_reduction = reduction
    replicated = [parameter for parameter in model.parameters() if parameter not in sharded]
    first = dist.get_global_rank(group, 0)
    for tensor in [*(p.data for p in replicated), *model.buffers()]:
        dist.broadcast(tensor, src=first, group=group)
    model._torchembed_gradient_mean = GradientMean(replicated, group)  # type: ignore[assignment]
