"""Plans and what they cost: pure numbers, without a process group."""
