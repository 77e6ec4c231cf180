"""Plans, and moving ids out to the ranks that hold their rows and vectors back."""

from torchembed.sharding.plan import Placement, Shard, ShardingPlan, TablePlan, make_plan
from torchembed.sharding.wire import WirePrecision

__all__ = ["Placement", "Shard", "ShardingPlan", "TablePlan", "WirePrecision", "make_plan"]
