"""Checkpoints in a folder or object store; tables, and rows by key, as safetensors."""

from torchembed.checkpoints.delta_folder import DeltaFolder
from torchembed.checkpoints.dynamicemb_rows import (
    KeyCounts,
    open_dynamicemb_counts,
    open_dynamicemb_rows,
)
from torchembed.checkpoints.hugectr_rows import open_hugectr_rows
from torchembed.checkpoints.load_deltas import load_deltas
from torchembed.checkpoints.managed_collision_rows import managed_collision_rows
from torchembed.checkpoints.model_rows import load_rows, model_rows
from torchembed.checkpoints.row_folder import export_rows, open_rows
from torchembed.checkpoints.row_source import RowSource
from torchembed.checkpoints.sok_rows import open_sok_rows

__all__ = [
    "DeltaFolder",
    "KeyCounts",
    "RowSource",
    "export_rows",
    "load_deltas",
    "load_rows",
    "managed_collision_rows",
    "model_rows",
    "open_dynamicemb_counts",
    "open_dynamicemb_rows",
    "open_hugectr_rows",
    "open_rows",
    "open_sok_rows",
]
