"""Sorting a batch's rows and finding the runs of equal ones."""

from torchembed.ops.segments.function import Runs, find_runs

__all__ = ["Runs", "find_runs"]
