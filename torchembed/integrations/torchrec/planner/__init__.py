"""What TorchRec's planner is told of torchembed's tables."""
