"""Matrices side by side, their columns in any order."""

from torchembed.ops.columns.function import join_columns

__all__ = ["join_columns"]
