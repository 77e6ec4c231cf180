"""Whole models written as tensors for other programs, and pretrained tables read."""

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchembed.checkpoints.exports.model_shards import ModelShards, WholeTensor
from torchembed.checkpoints.files.storage import Storage
from torchembed.checkpoints.files.tensor_file import INDEX, bytes_of, header_of
from torchembed.core import ranks
from torchembed.core.ranks.collective_errors import decide_on_first_rank, raise_on_all_ranks
from torchembed.tables import RowChunk, Table, row_chunks, table_of, write_rows

CHUNK_BYTES = 1 << 26
"""Size of the chunks in which rows are sent, written and converted."""


def whole_tables(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Gather the embedding tables of ``model`` one by one: the name in ``state_dict``, and the
    whole weight.

    The weight ``[R, D]`` is a copy on rank 0's CPU, fit for ``nn.EmbeddingBag.from_pretrained``;
    other ranks get None. In addition to its own rows, rank 0 needs memory for one whole table at a
    time, and the others for a chunk of rows. The model may be sharded or not. Every rank must
    iterate to the end.
    """
    shards = ModelShards(model)
    for name, whole in shards.tensors.items():
        if not whole.is_table:
            continue
        weight = torch.empty(whole.shape, dtype=whole.dtype) if ranks.rank() == 0 else None
        for first_row, rows in shards.chunks(name, CHUNK_BYTES):
            if weight is not None and rows is not None:
                weight[first_row : first_row + len(rows)] = rows
        yield name, weight


def export_safetensors(
    model: nn.Module, path: str | Path, *, max_file_bytes: int = 5 * 10**9
) -> None:
    """Write every parameter and persistent buffer of ``model``, whole, into a folder.

    The files are those that Hugging Face's libraries write: ``model.safetensors``, or, where that
    would be larger than ``max_file_bytes``, ``model-00001-of-00003.safetensors`` and so on with
    ``model.safetensors.index.json``. Rows stream to rank 0, which writes them as they come, so a
    table may be larger than its memory; a table is never divided between files. The folder appears
    once all is written; behind a URL of an object store each file does, of several files the index
    at last. The model may be sharded or not. Collective.

    Args:
        path: a local folder that is not there yet, or the URL, which fsspec knows, of one that
            holds nothing.

    Raises:
        FileExistsError: if ``path`` is there, or holds anything behind a URL.
        ValueError: for a tensor of a dtype that the format does not know.
        OSError: if writing fails.
    """
    what = f"export the model to {path}"
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes must be positive, got {max_file_bytes}")
    shards = ModelShards(model)
    if "://" in str(path):
        storage = raise_on_all_ranks(lambda: Storage(path), what)
        if not storage.is_local:
            _export_to_store(shards, storage, max_file_bytes, what)
            return
        path = storage.root
    path = Path(path)
    # Written next to the path and renamed at the end: a folder of that name is always whole.
    partial = path.with_name(f"{path.name}.partial")

    def begin() -> None:
        if path.exists():
            raise FileExistsError(f"path must not be there yet, and {path} is; remove it")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    decide_on_first_rank(begin, what)
    files = _files(shards.tensors, max_file_bytes)
    for name, tensors in files.items():
        open_file = functools.partial((partial / name).open, "wb")
        write_tensors(shards, open_file, tensors, what)

    def end() -> None:
        if len(files) > 1:
            (partial / INDEX).write_bytes(_index_of(shards, files))
        partial.rename(path)

    decide_on_first_rank(end, what)


def _export_to_store(shards: ModelShards, storage: Storage, max_file_bytes: int, what: str) -> None:
    """:func:`export_safetensors` to an object store, which has no folders to rename: a file shows
    there once it is whole, and of several the index comes last."""
    files = _files(shards.tensors, max_file_bytes)
    paths = {name: storage.path(name) for name in files}

    def begin() -> None:
        if names := storage.names():
            raise FileExistsError(
                f"path must hold nothing yet, and {storage.url} holds {names[0]}; remove it"
            )
        storage.mkdir(storage.root)

    decide_on_first_rank(begin, what)
    try:
        for name, tensors in files.items():
            open_file = functools.partial(storage.create_stream, paths[name], "wb")
            write_tensors(shards, open_file, tensors, what)
    except BaseException:
        # A stream that is closed by an error shows what was written until then.
        if ranks.rank() == 0:
            for path in paths.values():
                storage.remove(path)
        raise
    if len(files) > 1:
        index = _index_of(shards, files)
        decide_on_first_rank(lambda: storage.write(storage.path(INDEX), index), what)


def _index_of(shards: ModelShards, files: Mapping[str, Mapping[str, WholeTensor]]) -> bytes:
    """The content of the file that says which of ``files`` each tensor is in."""
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    total = sum(whole.num_bytes for whole in shards.tensors.values())
    return json.dumps(
        {"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2
    ).encode()


def _files(
    tensors: Mapping[str, WholeTensor], max_file_bytes: int
) -> dict[str, dict[str, WholeTensor]]:
    """Divide tensors into files of about ``max_file_bytes``: by file name, its tensors in order."""
    files: list[dict[str, WholeTensor]] = [{}]
    num_bytes = 0
    for name, whole in tensors.items():
        if files[-1] and num_bytes + whole.num_bytes > max_file_bytes:
            files.append({})
            num_bytes = 0
        files[-1][name] = whole
        num_bytes += whole.num_bytes
    # Readers map the file and view its bytes as numbers, which must be aligned. With the widest
    # dtypes first every tensor is, without gaps, which the format does not allow.
    files = [dict(sorted(f.items(), key=lambda item: -item[1].dtype.itemsize)) for f in files]
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": file
        for number, file in enumerate(files, start=1)
    }


def write_tensors(
    shards: ModelShards,
    open_file: Callable[[], contextlib.AbstractContextManager[Any]],
    tensors: Mapping[str, WholeTensor],
    what: str,
) -> None:
    """Write ``tensors``, some of those of ``shards``, whole, into one file; collective.

    Args:
        open_file: opens the file, which rank 0 writes.
        what: the action, for errors.
    """
    header = raise_on_all_ranks(
        lambda: header_of({n: (w.shape, w.dtype) for n, w in tensors.items()}), what
    )
    with contextlib.ExitStack() as stack:

        def begin() -> Any:
            return stack.enter_context(open_file()) if ranks.rank() == 0 else None

        file = raise_on_all_ranks(begin, what)

        def write(data: bytes | Tensor | None) -> None:
            if file is not None and data is not None:
                file.write(bytes_of(data) if isinstance(data, Tensor) else data)

        raise_on_all_ranks(lambda: write(header), what)
        for name in tensors:
            for _, rows in shards.chunks(name, CHUNK_BYTES):
                raise_on_all_ranks(functools.partial(write, rows), what)
        # Closing writes what is still buffered, and its error would be raised on rank 0 alone.
        raise_on_all_ranks(stack.close, what)


@torch.no_grad()
def import_tables(model: nn.Module, sources: Mapping[str, Tensor | np.ndarray]) -> None:
    """Copy pretrained rows into tables of ``model``, in place.

    Each rank reads only the rows and columns that it holds, some megabytes at a time, so a source
    may be larger than memory: a ``numpy.memmap``, or what
    :func:`~torchembed.training.open_safetensors` gives. Optimizer state stays as it is. The model
    may be sharded or not. Every rank must call it, with sources of the same content.

    Args:
        sources: by the table's name in ``state_dict``, rows ``[R, D]`` of any floating dtype; they
            are converted to the table's.

    Raises:
        ValueError: for a name that no table has, or that of a dynamic one, whose rows have ids;
            another shape, or a dtype that is not floating, on every rank; nothing is changed then.
            Also for a number that is not finite, or not in the table's dtype; the rows before it
            may have been copied then.
    """
    what = "import tables"
    shards = ModelShards(model)
    tables = {n: t for n, p in model.named_parameters() if (t := table_of(p)) is not None}

    def check() -> None:
        _check_sources(shards, sources)
        for name in sources:
            if name in tables and tables[name].spec.num_ids is None:
                raise ValueError(
                    f"source of {name} must not be of a dynamic table, whose rows have ids; write "
                    "its rows by torchembed.checkpoints.load_rows"
                )

    raise_on_all_ranks(check, what)

    def copy_rows() -> None:
        for name, table in tables.items():
            if name not in sources:
                continue
            for chunk in row_chunks(table, CHUNK_BYTES, with_states=False):
                rows = _source_rows(sources[name], table, chunk.keys).to(chunk.rows.dtype)
                _check_finite(name, chunk.keys, rows)
                write_rows(table, RowChunk(chunk.keys, rows, states={}))

    raise_on_all_ranks(copy_rows, what)


def _source_rows(source: Tensor | np.ndarray, table: Table, keys: Tensor) -> Tensor:
    """Rows of a table's ``source`` by consecutive ``keys``, the columns that are held here."""
    columns = slice(table.first_column, table.first_column + table.num_columns)
    rows = source[int(keys[0]) : int(keys[-1]) + 1, columns]
    # Copied, since torch warns of read-only arrays, as a memmap may be; one chunk at a time.
    return rows if isinstance(rows, Tensor) else torch.from_numpy(np.array(rows))


def _check_sources(shards: ModelShards, sources: Mapping[str, Tensor | np.ndarray]) -> None:
    tables = {name: whole for name, whole in shards.tensors.items() if whole.is_table}
    for name, source in sources.items():
        if name not in tables:
            raise ValueError(f"sources must be named as the tables are, {list(tables)}; got {name}")
        if tuple(source.shape) != tables[name].shape:
            raise ValueError(
                f"source of {name} must have shape {list(tables[name].shape)} as the table has, "
                f"got {list(source.shape)}"
            )
        is_floating = (
            source.is_floating_point()
            if isinstance(source, Tensor)
            else np.issubdtype(source.dtype, np.floating)
        )
        if not is_floating:
            raise ValueError(f"source of {name} must have a floating dtype, got {source.dtype}")


def _check_finite(name: str, keys: Tensor, rows: Tensor) -> None:
    """Raise ``ValueError`` with the first of ``rows [n, D]`` of a source that is not all finite.

    Args:
        keys: int64 ``[n]``, the rows' numbers in the source.
    """
    is_finite = rows.isfinite().all(dim=1)
    if not is_finite.all():
        row = int(is_finite.logical_not().int().argmax())
        bad = rows[row][~rows[row].isfinite()][0].item()
        raise ValueError(
            f"source of {name} must hold finite numbers in {rows.dtype}, got {bad} in row "
            f"{keys[row]} (from 0); repair or remove such rows"
        )
