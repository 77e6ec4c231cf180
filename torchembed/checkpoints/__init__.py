"""Checkpoints in a folder or object store; tables, and rows by key, as safetensors."""

from torchembed.checkpoints.exports.delta_folder import DeltaFolder
from torchembed.checkpoints.exports.load_deltas import load_deltas
from torchembed.checkpoints.rows.dynamicemb_rows import (
    KeyCounts,
    open_dynamicemb_counts,
    open_dynamicemb_rows,
)
from torchembed.checkpoints.rows.hugectr_rows import open_hugectr_rows
from torchembed.checkpoints.rows.managed_collision_rows import managed_collision_rows
from torchembed.checkpoints.rows.model_rows import load_rows, model_rows
from torchembed.checkpoints.rows.row_folder import export_rows, open_rows
from torchembed.checkpoints.rows.row_source import RowSource
from torchembed.checkpoints.rows.safetensors_rows import open_safetensors_rows
from torchembed.checkpoints.rows.sok_rows import open_sok_rows

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
    "open_safetensors_rows",
    "open_sok_rows",
]
