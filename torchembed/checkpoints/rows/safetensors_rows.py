"""A matrix in safetensors files as rows by key, whatever library wrote them."""

from collections.abc import Iterator
from pathlib import Path

import torch

from torchembed.checkpoints.files.tensor_file import open_safetensors
from torchembed.checkpoints.rows.distinct_keys import check_distinct
from torchembed.checkpoints.rows.row_source import CHUNK_BYTES, RowSource
from torchembed.tables import RowChunk, row_ranges

_ROW_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def open_safetensors_rows(
    path: str | Path,
    tensor: str,
    *,
    keys: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> RowSource:
    """Rows of a tensor of a safetensors file, of which some are read at a time; no model is needed.

    The file must stay as it is while its rows are read.

    Args:
        path: a file, a folder of files or their URL, as for
            :func:`~torchembed.training.open_safetensors`.
        tensor: name of the rows there, ``[R, D]`` of 16, 32 or 64 bits of floating point.
        keys: name of their keys there, int64 ``[R]``, each once; None: the numbers of the rows,
            from 0, as of a static table.
        chunk_bytes: of a chunk's keys and rows, at most, unless a row is larger.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is cut off or of another format, has no tensor of these names, or one of
            another dtype or shape; or a key stands there more than once.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
    tensors = open_safetensors(path)
    for argument, name in (("tensor", tensor), ("keys", keys)):
        if name is not None and name not in tensors:
            raise ValueError(
                f"{argument} must name a tensor of {path}, {sorted(tensors)}, got {name!r}"
            )
    rows = tensors[tensor]
    if rows.dim() != 2 or rows.shape[1] < 1 or rows.dtype not in _ROW_DTYPES:
        raise ValueError(
            f"tensor {tensor!r} of {path} must be rows [R, D] of 16, 32 or 64 bits of floating "
            f"point, got {rows.dtype} {list(rows.shape)}"
        )
    num_rows, row_bytes = len(rows), rows.shape[1] * rows.element_size() + 8
    ids = None if keys is None else tensors[keys]
    if ids is not None and (ids.dtype, ids.shape) != (torch.int64, (num_rows,)):
        raise ValueError(
            f"tensor {keys!r} of {path} must be the key of each row, torch.int64 [{num_rows}], got "
            f"{ids.dtype} {list(ids.shape)}"
        )
    # At least one chunk comes.
    ranges = list(row_ranges(num_rows, row_bytes, chunk_bytes)) or [range(0)]

    def chunks() -> Iterator[RowChunk]:
        for span in ranges:
            part = slice(span.start, span.stop)
            found = torch.arange(span.start, span.stop) if ids is None else ids[part].clone()
            yield RowChunk(found, rows[part].clone(), states={})

    if ids is not None:
        check_distinct(
            lambda: ((str(path), ids[span.start : span.stop].clone()) for span in ranges),
            num_rows,
            f"tensor {keys!r} of {path}",
        )
    return RowSource(num_rows=num_rows, embedding_dim=rows.shape[1], chunks=chunks)
