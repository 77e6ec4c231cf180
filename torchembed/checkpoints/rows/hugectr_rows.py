"""Sparse models of HugeCTR as rows by key: folders with the files ``key`` and ``emb_vector``.

``key`` holds a signed 64-bit number for each row, whatever keys the model was trained with, and
``emb_vector`` float32 ``[n, D]`` in the same order. Localized embeddings have ``slot_id`` beside
them, 64 bits a row, which their own placement alone needs.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from torchembed.checkpoints.files.storage import Storage
from torchembed.checkpoints.rows.row_source import (
    CHUNK_BYTES,
    Column,
    RowSource,
    raw_column,
    source_of_columns,
)
from torchembed.tables import RowChunk


def open_hugectr_rows(
    paths: str | Path | Sequence[str | Path],
    *,
    embedding_dim: int,
    chunk_bytes: int = CHUNK_BYTES,
) -> RowSource:
    """Rows of a sparse model that HugeCTR saved, checked before the first one is read.

    Optimizer states, which HugeCTR saves in files of their own and in the order of its GPUs, are
    not read.

    Args:
        paths: its folder, or several that hold parts of one table; URLs as fsspec knows them, too.
        embedding_dim: columns of a row, which the files do not say.
        chunk_bytes: of a chunk's tensors, at most, unless a row is larger.

    Raises:
        FileNotFoundError: if a folder lacks one of the files.
        ValueError: if the sizes of files do not fit together, keys are of 32 bits, or a key
            stands there more than once.
    """
    if embedding_dim < 1:
        raise ValueError(f"embedding_dim must be at least 1, got {embedding_dim}")
    folders = [paths] if isinstance(paths, str | Path) else list(paths)
    if not folders:
        raise ValueError("paths must be at least one folder, got none")
    return source_of_columns(
        [_columns(Storage(folder), embedding_dim) for folder in folders],
        lambda tensors: RowChunk(tensors["keys"], tensors["rows"], states={}),
        what=" and ".join(f"folder {folder}" for folder in folders),
        chunk_bytes=chunk_bytes,
    )


def _columns(storage: Storage, embedding_dim: int) -> dict[str, Column]:
    names = storage.names()
    for name in ("key", "emb_vector"):
        if name not in names:
            raise FileNotFoundError(
                f"folder {storage.url} must hold the files key and emb_vector of a sparse model, "
                f"and lacks {name}; it holds {names}"
            )
    rows = raw_column(storage, storage.path("emb_vector"), torch.float32, (embedding_dim,))
    path = storage.path("key")
    if rows.num_rows and storage.num_bytes(path) == 4 * rows.num_rows:
        raise ValueError(
            f"file {path} must hold a key of 64 bits for each of {rows.num_rows} rows, and has 32 "
            "bits for each; convert them to signed numbers of 64 bits"
        )
    keys = raw_column(storage, path, torch.int64)
    if "slot_id" in names:
        slots = raw_column(storage, storage.path("slot_id"), torch.int64)
        if slots.num_rows != keys.num_rows:
            raise ValueError(
                f"file {slots.path} must have {keys.num_rows} numbers, as many as there are keys "
                f"in {keys.path}, got {slots.num_rows}"
            )
    return {"keys": keys, "rows": rows}
