"""Plans of tables over ranks, their cost, and the exchanges of ids, vectors and gradients."""

from torchembed.sharding.planning.dense_costs import DenseCost, DenseUse
from torchembed.sharding.planning.node_disk import NodeDisk
from torchembed.sharding.planning.options import TableConstraint
from torchembed.sharding.planning.plan import Placement, Shard, ShardingPlan, TablePlan, make_plan
from torchembed.sharding.planning.plan_picture import draw_plan
from torchembed.sharding.planning.plan_report import PlanReport, RankCost, TableCost
from torchembed.sharding.planning.planner import Planner
from torchembed.sharding.planning.table_use import TableUse
from torchembed.sharding.planning.topology import CPU, H100, H200, Hardware, Host, Topology
from torchembed.sharding.wire import WirePrecision, WireTransport

__all__ = [
    "CPU",
    "H100",
    "H200",
    "DenseCost",
    "DenseUse",
    "Hardware",
    "Host",
    "NodeDisk",
    "Placement",
    "PlanReport",
    "Planner",
    "RankCost",
    "Shard",
    "ShardingPlan",
    "TableConstraint",
    "TableCost",
    "TablePlan",
    "TableUse",
    "Topology",
    "WirePrecision",
    "WireTransport",
    "draw_plan",
    "make_plan",
]
