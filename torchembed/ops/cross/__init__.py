"""The cross layers of DCN-V2, low-rank and full-rank."""

from torchembed.ops.cross.function import cross_epilogue, full_rank_cross
from torchembed.ops.cross.low_rank import low_rank_cross_network

__all__ = ["cross_epilogue", "full_rank_cross", "low_rank_cross_network"]
