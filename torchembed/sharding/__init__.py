"""Plans, what they cost, and moving ids out to the ranks that hold their rows and vectors back."""

from torchembed.sharding.costs import TableUse
from torchembed.sharding.dense_costs import DenseCost, DenseUse
from torchembed.sharding.options import TableConstraint
from torchembed.sharding.plan import Placement, Shard, ShardingPlan, TablePlan, make_plan
from torchembed.sharding.plan_picture import draw_plan
from torchembed.sharding.plan_report import PlanReport, RankCost, TableCost
from torchembed.sharding.planner import Planner
from torchembed.sharding.topology import CPU, H100, H200, Hardware, Topology
from torchembed.sharding.transport import WireTransport
from torchembed.sharding.wire import WirePrecision

__all__ = [
    "CPU",
    "H100",
    "H200",
    "DenseCost",
    "DenseUse",
    "Hardware",
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
