"""Tables whose rows live outside the device, behind a cache on it."""

from torchembed.tables.tiers.host_memory import host_tensor
from torchembed.tables.tiers.tiered_group import FetchedRows, TieredGroup

__all__ = ["FetchedRows", "TieredGroup", "host_tensor"]
