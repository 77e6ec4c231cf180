"""torchembed's tables in TorchRec's planner."""
