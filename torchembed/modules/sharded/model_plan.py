"""Plans of a model: how modules use its tables, and checks of plans against model and mesh."""

import dataclasses
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchembed.core.checks import FLOAT_DTYPES
from torchembed.modules.collection import Collection
from torchembed.modules.embedding import Embedding, EmbeddingBag
from torchembed.modules.embedding_bag_collection import EmbeddingBagCollection
from torchembed.modules.embedding_collection import EmbeddingCollection
from torchembed.modules.sharded.dense_use import dense_use
from torchembed.modules.sharded.earlier_optimizers import check_no_optimizer_has
from torchembed.modules.single_table import SingleTable
from torchembed.modules.table_module import TableModule
from torchembed.sharding.planning.node_disk import known_on_all
from torchembed.sharding.planning.plan import Placement, ShardingPlan, make_plan, place_table
from torchembed.sharding.planning.plan_report import PlanReport
from torchembed.sharding.planning.planner import Planner
from torchembed.sharding.planning.table_use import TableUse
from torchembed.sharding.planning.topology import Topology
from torchembed.sharding.transport.table_ranks import flat_mesh, num_nodes
from torchembed.sharding.wire import WirePrecision, WireTransport
from torchembed.tables import TableSpec

_COLLECTIONS: tuple[type[nn.Module], ...] = (EmbeddingBagCollection, EmbeddingCollection)


def table_specs(model: nn.Module) -> dict[str, TableSpec]:
    """The unsharded tables in ``model``, by parameter name less ``.weight``."""
    return {name: use.spec for name, use in table_uses(model).items()}


def table_uses(model: nn.Module) -> dict[str, TableUse]:
    """The tables of all unsharded collections in ``model`` and of its modules of one table, by
    parameter name less ``.weight``, and how they are used: the input of a
    :class:`~torchembed.sharding.Planner`. The name of such a module is also that of its feature.

    Raises:
        ValueError: for collections of derived classes, and for dynamic tables that cannot be
            sharded.
    """
    _check_collections(model)
    _check_dynamic_tables(model)
    uses = {
        name: TableUse(
            spec=single_spec(module),
            features=(name,),
            pooled=isinstance(module, EmbeddingBag),
            module=name,
        )
        for name, module in single_tables(model).items()
    }
    for path, collection in model.named_modules():
        if isinstance(collection, Collection):
            description = collection.description
            tables = collection.table_set.tables
            for table, config in zip(tables, description.configs, strict=True):
                uses[table_name(path, collection, table.spec.name)] = TableUse(
                    spec=table.spec,
                    features=config.feature_names,
                    pooled=description.is_pooled,
                    output_dtype=description.output_dtype,
                    module=path,
                )
    return uses


def _check_collections(model: nn.Module) -> None:
    """Raise ``ValueError`` where a collection of ``model`` is of a class derived from ours, whose
    own code its sharded counterpart would not run."""
    for path, module in model.named_modules():
        if isinstance(module, Collection) and type(module) not in _COLLECTIONS:
            base = next(kind for kind in type(module).__mro__ if kind in _COLLECTIONS)
            raise ValueError(
                f"module {path!r} must be an {base.__name__} itself to be sharded, got a "
                f"{type(module).__name__}, which is derived from it and whose own code would be "
                f"lost; hold an {base.__name__} in a module of your own"
            )


def _check_dynamic_tables(model: nn.Module) -> None:
    """Raise ``ValueError`` where a dynamic table of ``model`` cannot be sharded, or holds ids."""
    singles = set(single_tables(model).values())
    for path, module in model.named_modules():
        tables = module.table_set.tables if isinstance(module, TableModule) else []
        for table in tables:
            if table.spec.num_ids is not None:
                continue
            if isinstance(module, SingleTable) and module not in singles:
                raise ValueError(
                    f"the table of module {path!r} must not be dynamic where ranks share it, since "
                    "a module of a derived class, or of a weight that is float64 or another "
                    "module's too, is not sharded; put it into an EmbeddingBagCollection or "
                    "EmbeddingCollection"
                )
            if isinstance(module, (Collection, SingleTable)) and table.holds_ids():
                raise ValueError(
                    f"dynamic table {table.spec.name} of module {path!r} must hold no ids before "
                    "it is sharded, since its rows are not moved to other ranks; shard the model "
                    "before it is trained"
                )


def single_tables(model: nn.Module) -> dict[str, SingleTable]:
    """The modules of one table in ``model`` that can be sharded, by name: of no class that is
    derived from ours, and whose weight is a parameter of no other module, and no float64 one."""
    modules = {
        name: module
        for name, module in model.named_modules()
        if name and isinstance(module, SingleTable) and type(module) in (Embedding, EmbeddingBag)
    }
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders.setdefault(id(parameter), set()).add(id(module))
    return {
        name: module
        for name, module in modules.items()
        if module.weight.dtype in FLOAT_DTYPES
        and "weight" in module._parameters
        and len(holders[id(module.weight)]) == 1
    }


def single_spec(module: SingleTable) -> TableSpec:
    """The table of ``module``, in the dtype that it has now."""
    return dataclasses.replace(module.table_set.tables[0].spec, dtype=module.weight.dtype)


def table_name(path: str, collection: Collection, table: str) -> str:
    """The name of a table's parameter in the model, less ``.weight``."""
    return ".".join(filter(None, (path, collection.description.container, table)))


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
        check_mesh(mesh)
        planner = with_topology(planner, mesh, flat_mesh(mesh))
        _check_topology(planner, mesh)
    return planned_by(model, planner, wire, transport)


def planned_by(
    model: nn.Module, planner: Planner, wire: WirePrecision | None, transport: WireTransport
) -> PlanReport:
    """The report of a planner that has a topology."""
    uses = table_uses(model)
    dense = dense_use(model, uses, planner.autocast)
    return planner.plan(uses, wire=wire, transport=transport, dense=dense)


def with_topology(planner: Planner, mesh: DeviceMesh, flat: DeviceMesh) -> Planner:
    """``planner``, with the topology of the mesh where it has none, which is collective; and with
    the capacity that the ranks find where its disk has none, likewise."""
    group, topology = flat.get_group(), planner.topology
    if topology is None:
        topology = Topology.of_group(group, device_of(mesh), num_nodes=num_nodes(mesh))
    disk = known_on_all(planner.disk or topology.disk, group, topology.ranks_per_node)
    topology = dataclasses.replace(topology, disk=disk)
    return dataclasses.replace(planner, topology=topology, disk=None)


def planner_lines(planner: Planner | None) -> list[str]:
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


def check_mesh(mesh: object) -> None:
    """Raise ``TypeError`` for another object, ``RuntimeError`` for a mesh without process group."""
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


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def checked_plan(
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
        TypeError: for a ``wire`` that is none.
    """
    if isinstance(model, (Collection, SingleTable)):
        raise ValueError(
            f"model must contain modules with tables, got an {type(model).__name__} itself; wrap "
            "it in a module"
        )
    for name, module in model.named_modules():
        if isinstance(module, TableModule) and not isinstance(module, (Collection, SingleTable)):
            raise ValueError(
                f"model must not be sharded yet, but its {name} is a {type(module).__name__}; call "
                "shard_embeddings once"
            )
    specs, report = table_specs(model), None
    if not isinstance(wire, WirePrecision):
        raise TypeError(
            f"wire must be a WirePrecision, as WirePrecision(forward=torch.bfloat16), got {wire!r}"
        )
    if plan is not None and not isinstance(plan, (ShardingPlan, Planner, Mapping)):
        raise ValueError(
            f'plan must be "auto", a Planner, a ShardingPlan or placements by table, got {plan!r}'
        )
    if isinstance(plan, Planner):
        _check_topology(plan, mesh)
        report = planned_by(model, plan, wire, transport)
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
        if spec.storage not in (None, given.storage):
            raise ValueError(
                f"plan's storage of table {given.table} must be {spec.storage}, as the model says, "
                f"got {given.storage}; make the plan for this model, or change the model"
            )
        spec = dataclasses.replace(spec, storage=given.storage)
        made = place_table(given.table, spec, given.placement, ranks)
        if given != made or (
            given.placement is Placement.DATA_PARALLEL and len(ranks) < mesh.size()
        ):
            raise ValueError(
                f"plan of table {given.table} must divide {spec.num_rows} rows of {spec.dim} "
                f"columns as place_table does, got {given}"
            )
    singles, parameters = single_tables(model), dict(model.named_parameters())
    replaced = {
        name: parameters[f"{name}.weight"]
        for name in specs
        if name not in singles or plan.table(name).placement is not Placement.DATA_PARALLEL
    }
    check_no_optimizer_has(replaced)
    meta = [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_meta and name.removesuffix(".weight") not in replaced
    ]
    if meta:
        raise ValueError(
            f"parameters {meta} are on the meta device; make them real before sharding"
        )
    return plan, report
