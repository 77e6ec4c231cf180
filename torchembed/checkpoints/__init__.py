"""Checkpoints in a folder or object store; tables, and rows by key, as safetensors."""

from torchembed.checkpoints.row_folder import export_rows, open_rows
from torchembed.checkpoints.row_source import RowSource

__all__ = ["RowSource", "export_rows", "open_rows"]
