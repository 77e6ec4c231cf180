"""``Planner``: places tables so that the slowest rank takes the least time, as predicted."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple, cast

import torch

from torchembed.core.checks import check_autocast
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.optim import Adagrad
from torchembed.optim.fused import FusedOptimizer
from torchembed.sharding.planning.costs import CostModel
from torchembed.sharding.planning.dense_costs import DenseUse
from torchembed.sharding.planning.node_disk import NodeDisk
from torchembed.sharding.planning.options import TableConstraint, table_options
from torchembed.sharding.planning.plan import Placement, ShardingPlan, as_placement
from torchembed.sharding.planning.plan_report import PlanReport, report_plan
from torchembed.sharding.planning.refusal import refusal
from torchembed.sharding.planning.search import Search
from torchembed.sharding.planning.storage_costs import PlannedCache
from torchembed.sharding.planning.table_use import TableUse
from torchembed.sharding.planning.tier_choice import TierChoice
from torchembed.sharding.planning.topology import Topology
from torchembed.sharding.wire import WirePrecision, WireTransport, check_wire

_SHARES = (1.0, 0.95, 0.9, 0.8, 0.65, 0.5, 0.25, 0.0)
"""Shares of the devices' memory that rows and caches are to take; less where no plan is found that
fits, since tables are not divided at will."""


def check_optimizer_class(optimizer: object) -> None:
    """Raise ``TypeError`` unless ``optimizer`` is the class of one that trains tables."""
    if not (isinstance(optimizer, type) and issubclass(optimizer, FusedOptimizer)):
        raise TypeError(
            "optimizer must be the class of an optimizer of tables, as torchembed.optim.Adagrad, "
            f"got {optimizer!r}"
        )


class _Placed(NamedTuple):
    """A plan that may lack memory."""

    report: PlanReport
    missing_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planner:
    """Places tables by predicted cost, for ``shard_embeddings(model, mesh, plan=Planner(...))``.

    It minimizes the predicted time of the slowest rank in a training step. That time is the sum of
    the bytes that lookups and updates move through memory; the bytes on the rank's busiest link in
    its busier direction, for ids, vectors and gradients each; the all-reduce of replicated tables;
    and a fixed overhead for the kernels of each row width. No rank gets more rows, optimizer state,
    activations and exchange buffers than fit into its memory. The same inputs give the same plan on
    every rank.

    Tables whose configs name a storage keep it. If the others do not fit on the GPUs, the planner
    moves some of them to host memory, behind caches on the devices, and if hosts have no room, to
    disk, behind both. It moves those whose cache misses cost the least time for the memory that
    they free. A cache has room for the rows of two batches at least. Dynamic tables that grow stay
    on the devices. Tables go to disk only if a path is given.
    """

    batch_size: int = 1024
    """The number of samples in each rank's batch."""
    hotness: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The mean number of ids that a sample has, for each feature; 1 for features not named."""
    distinct_ids: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The mean number of different ids in a rank's batch, for each feature:
    ``values.unique().numel()`` of a typical batch. It tells how skewed ids are, and so how many
    rows are read and updated on any number of ranks. For features not named ids count as uniform,
    which gives the most rows."""
    optimizer: type[FusedOptimizer] = Adagrad
    """Optimizer of the tables, whose state takes memory and is read and written."""
    fixed_hotness: bool = False
    """True if batches have a hotness and no offsets: all ids of a pooled row-wise table then go to
    all of its ranks, and not each id to the rank that holds its row."""
    autocast: torch.dtype | None = None
    """Dtype in which the dense part computes, as for ``TrainPipeline``; its own by default."""
    placements: tuple[Placement | str, ...] = tuple(Placement)
    """Allowed placements of tables whose own constraint names none."""
    constraints: Mapping[str, TableConstraint] = dataclasses.field(default_factory=dict)
    """Constraint of each table, by its name in the plan."""
    max_imbalance: float = math.inf
    """Bound on the slowest rank's predicted time over the mean of all ranks. A plan within it is
    preferred to a faster one beyond it; where the search finds none, the nearest one is taken.

    No bound by default, since a step takes as long as its slowest rank. Where one table has most of
    the lookups, it takes more work on all ranks to make them even: once its rows are divided over
    all, each sends a vector for every sample. MLPerf's DLRM-DCNv2 on 256 H200 is predicted to take
    30 ms with the slowest rank at 2.5 times the mean, and 38 ms within 1.15 times, of which a rank
    has 34 ms to do on average instead of 12. Up to 16 the fastest plan is within 1.05 times."""
    topology: Topology | None = None
    """Ranks, memory and bandwidths; None for those that the mesh's ranks have when planning."""
    disk: NodeDisk | None = None
    """Disk of each node, beside the memory that the mesh's ranks have; None where ``topology`` is
    given, which has its own."""

    def __post_init__(self) -> None:
        if isinstance(self.batch_size, bool) or not hasattr(self.batch_size, "__index__"):
            raise TypeError(f"batch_size must be an int, got {self.batch_size!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {self.batch_size}")
        for feature, lookups in self.hotness.items():
            if not lookups >= 0:
                raise ValueError(f"hotness of {feature} must not be negative, got {lookups}")
            if math.isinf(lookups):
                raise ValueError(f"hotness of {feature} must be finite, got {lookups}")
        for feature, count in self.distinct_ids.items():
            num_ids = self.batch_size * self.hotness.get(feature, 1.0)
            if not 0 < count <= num_ids:
                raise ValueError(
                    f"distinct_ids of {feature} must be positive and at most the {num_ids:g} ids "
                    f"that batch_size and hotness give a batch, got {count}"
                )
        check_optimizer_class(self.optimizer)
        check_autocast(self.autocast)
        for name, constraint in self.constraints.items():
            if not isinstance(constraint, TableConstraint):
                raise TypeError(
                    f"constraints must map names of tables to TableConstraint(...), got "
                    f"{constraint!r} for {name}; allow placements by "
                    "TableConstraint(placements=(...,))"
                )
        if not self.max_imbalance >= 1:
            raise ValueError(f"max_imbalance must be at least 1, got {self.max_imbalance}")
        if self.topology is not None and self.disk is not None:
            raise ValueError(
                f"disk must be None where topology is given, got {self.disk}; pass "
                "Topology(disk=...)"
            )
        if not self.placements:
            raise ValueError("placements must name at least one, got none")
        allowed = tuple(as_placement("(any)", value) for value in self.placements)
        object.__setattr__(self, "placements", allowed)

    def plan(
        self,
        tables: Mapping[str, TableUse],
        topology: Topology | None = None,
        *,
        wire: WirePrecision | None = None,
        transport: WireTransport = WireTransport.COLLECTIVE,
        dense: DenseUse | None = None,
    ) -> PlanReport:
        """The plan for ``tables``, by name, with what it costs. Communicates and allocates nothing.

        Args:
            tables: as :func:`~torchembed.modules.table_uses` finds them in a model.
            topology: in place of the planner's own; one of them must be given.
            wire: the precision in which vectors and gradients are exchanged; their own by default.
            transport: of vectors and gradients; push takes more memory.
            dense: the use of all other parameters, whose cost the report then holds.

        Raises:
            ValueError: for a constraint, hotness or distinct ids of an unknown table or feature,
                for a constraint that leaves no placement, for tables that do not fit, and for a
                wire that ``transport`` cannot send in.
            FileNotFoundError: if the folder that is to hold that of the topology's disk is
                missing, and the disk has no capacity.
        """
        topology = topology or self.topology
        if topology is None:
            raise ValueError(
                "topology must be given where the planner has none; pass Topology(...)"
            )
        topology = dataclasses.replace(topology, disk=topology.disk.known())
        self._check_names(tables)
        wire = wire or WirePrecision()
        check_wire(wire, transport)
        model = CostModel(
            topology=topology,
            batch_size=self.batch_size,
            rule=UpdateRule(kind=self.optimizer.kind),
            wire=wire,
            fixed_hotness=self.fixed_hotness,
            hotness=self.hotness,
            distinct_ids=self.distinct_ids,
            transport=transport,
        )
        found = self._placed(tables, model, {}, dense)
        if found.missing_bytes > 0:
            found = self._in_tiers(tables, model, found, dense)
        if found.missing_bytes > 0:
            raise ValueError(refusal(found.report))
        return found.report

    def _placed(
        self,
        tables: Mapping[str, TableUse],
        model: CostModel,
        caches: Mapping[str, PlannedCache],
        dense: DenseUse | None,
    ) -> _Placed:
        """The best plan found, with some tables in host memory or on disk, behind ``caches``."""
        allowed, topology = cast("tuple[Placement, ...]", self.placements), model.topology
        options = [
            table_options(
                name,
                use,
                model,
                allowed,
                self.constraints.get(name, TableConstraint()),
                caches.get(name),
            )
            for name, use in tables.items()
        ]
        found = Search(model, options).best(self.max_imbalance)
        plans = []
        for (name, use), of_table, pick, ranks in zip(
            tables.items(), options, found.picks, found.ranks, strict=True
        ):
            plans.append(of_table[pick].plan(name, use, ranks.tolist()))
        plan = ShardingPlan(
            num_ranks=topology.num_ranks, tables=tuple(plans), num_nodes=topology.num_nodes
        )
        return _Placed(report_plan(plan, tables, model, dense), found.missing_bytes)

    def _in_tiers(
        self,
        tables: Mapping[str, TableUse],
        model: CostModel,
        on_devices: _Placed,
        dense: DenseUse | None,
    ) -> _Placed:
        """A plan that takes tables from the devices, on which not all of them fit: with as much
        memory for caches as leaves a plan that fits, if one does."""
        movable = {
            name: use
            for name, use in tables.items()
            if self._is_movable(use, self.constraints.get(name))
        }
        topology, report = model.topology, on_devices.report
        has_host = bool(topology.host.memory_bytes) and not topology.devices_are_hosts
        has_disk = topology.disk.path is not None
        if not movable or not (has_host or has_disk):
            return on_devices
        choice = TierChoice(movable, model)
        others = [cost for cost in report.tables if cost.table not in movable]
        fixed = sum(rank.buffer_bytes + rank.growth_bytes for rank in report.ranks)
        fixed += sum(cost.busiest_bytes * len(cost.ranks) for cost in others)
        free = topology.num_ranks * topology.memory_bytes - fixed
        host_free = topology.num_nodes * topology.host.memory_bytes
        host_free -= sum(rank.host_bytes for rank in report.ranks)
        disk_free = topology.num_nodes * (topology.disk.capacity_bytes or 0)
        disk_free -= sum(rank.disk_bytes for rank in report.ranks)
        best, last = on_devices, {}
        for share in _SHARES:
            # Tables in host memory are there whole, but with a disk they are divided, too.
            in_hosts = share * host_free if has_disk else host_free
            caches = choice.within(share * free, in_hosts, disk_free)
            if caches != last:
                last, found = caches, self._placed(tables, model, caches, dense)
                best = min(best, found, key=lambda placed: placed.missing_bytes)
            if best.missing_bytes == 0:
                break
        return best

    @staticmethod
    def _is_movable(use: TableUse, constraint: TableConstraint | None) -> bool:
        """True for a table whose storage neither its config nor a constraint says."""
        if use.spec.storage is not None or use.spec.index.grows:
            return False
        if constraint is None or constraint.placements is None:
            return constraint is None or constraint.exact is None
        named = [as_placement("(any)", value) for value in constraint.placements]
        return any(placement is not Placement.DATA_PARALLEL for placement in named)

    def _check_names(self, tables: Mapping[str, TableUse]) -> None:
        unknown = sorted(set(self.constraints) - set(tables))
        if unknown:
            raise ValueError(
                f"constraints name tables {unknown}, which the model lacks; it has {list(tables)}"
            )
        features = sorted({feature for use in tables.values() for feature in use.features})
        for name, given in (("hotness", self.hotness), ("distinct_ids", self.distinct_ids)):
            unknown = sorted(set(given) - set(features))
            if unknown:
                raise ValueError(
                    f"{name} names features {unknown}, which no table has; they have {features}"
                )
