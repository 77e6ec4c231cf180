"""Dumps of NVIDIA's dynamicemb as rows by key.

``DynamicEmbDump`` makes a folder for each collection. Each rank writes there, of each table, the
files ``<table>_emb_<item>.rank_<R>.world_size_<W>``, without a head and little-endian: ``keys``,
int64; ``values``, float32 ``[n, D]``; ``scores``, a number of 64 bits or several for each row; and,
where asked, ``opt_values``, float32. Rank 0 says in ``<table>_opt_args.json`` which optimizer and
which eviction these are of.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.checkpoints.files.storage import Storage
from torchembed.checkpoints.rows.row_source import (
    CHUNK_BYTES,
    Column,
    Columns,
    RowSource,
    check_columns,
    check_lengths,
    raw_column,
    read_columns,
    source_of_columns,
)
from torchembed.tables import RowChunk

_KEYS, _VALUES, _SCORES, _STATES = "emb_keys", "emb_values", "emb_scores", "emb_opt_values"
_COUNTER_KEYS, _COUNTS = "counter_keys", "counter_frequencies"
_FILE = re.compile(
    r"(?P<table>.+)_(?P<item>emb_keys|emb_values|emb_scores|emb_opt_values|counter_keys|"
    r"counter_frequencies)\.rank_(?P<rank>\d+)\.world_size_(?P<world_size>\d+)"
)
_BY_AGE = "KLru"
"""Eviction whose scores are the time since the last use, since GPUs' clocks differ."""
_STATE_NAMES = {
    "sgd": (),
    "exact_adagrad": ("sum",),
    "exact_row_wise_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
"""States side by side in a row, by dynamicemb's name of the optimizer."""
_ROW_WISE = "exact_row_wise_adagrad"


class KeyCounts(NamedTuple):
    """Numbers of occurrences of keys that have no rows yet."""

    keys: Tensor
    """int64 ``[n]``, each at most once."""
    counts: Tensor
    """int64 ``[n]``."""


def open_dynamicemb_rows(
    path: str | Path,
    table: str,
    *,
    embedding_dim: int,
    score_column: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> RowSource:
    """Rows of a table that ``DynamicEmbDump`` wrote on any number of ranks, checked before the
    first one is read.

    Optimizer states come by their names here: ``sum`` of Adagrad, ``[n, D]``, and of row-wise
    Adagrad, ``[n]``; ``exp_avg`` and ``exp_avg_sq`` of Adam. The number of Adam's steps is in
    ``<table>_opt_args.json`` alone, under ``iters``. Scores are greater for rows to be kept. The
    dump of a table that evicts by time holds ages instead: they become times of the last use,
    counted from 1 for the row that was used the longest ago, in nanoseconds as ages are.

    Args:
        path: the collection's folder in the dump, or a URL that fsspec knows.
        table: name of the table.
        embedding_dim: columns of a row.
        score_column: which one to take, from 0, where rows have several scores.
        chunk_bytes: of a chunk's tensors, at most, unless a row is larger.

    Raises:
        FileNotFoundError: if there is no such table, or a file of a rank is missing.
        ValueError: if there are files of several numbers of ranks; the sizes of files do not fit
            together; the optimizer is one that torchembed does not have; ``score_column`` is
            missing or there is no such column; or a key stands there more than once.
    """
    if embedding_dim < 1:
        raise ValueError(f"embedding_dim must be at least 1, got {embedding_dim}")
    storage = Storage(path)
    files = _files(storage, table, (_KEYS, _VALUES), (_SCORES, _STATES))
    keys = _raw(storage, files[_KEYS], torch.int64)
    columns = {
        "keys": keys,
        "rows": _raw(storage, files[_VALUES], torch.float32, embedding_dim),
    }
    arguments = _arguments(storage, table) if files.keys() & {_SCORES, _STATES} else {}
    if _SCORES in files:
        num_scores = _numbers_a_row(storage, files[_SCORES], keys)
        score_column = _chosen_column(table, score_column, num_scores)
        columns["scores"] = _raw(storage, files[_SCORES], torch.int64, num_scores)
    elif score_column is not None:
        raise ValueError(f"score_column must be None for table {table}, which has no scores")
    is_row_wise = arguments.get("opt_type") == _ROW_WISE
    names = _state_names(storage, table, arguments) if _STATES in files else ()
    if names:
        width = 1 if is_row_wise else len(names) * embedding_dim
        columns["states"] = _raw(storage, files[_STATES], torch.float32, width)
    elif _STATES in files:
        _check_empty(storage, files[_STATES])
    parts = [
        dict(zip(columns, of_rank, strict=True)) for of_rank in zip(*columns.values(), strict=True)
    ]
    check_lengths(parts)
    is_by_age = "scores" in columns and str(arguments.get("evict_strategy")).endswith(_BY_AGE)
    oldest = _greatest_age(table, parts, score_column, chunk_bytes) if is_by_age else 0

    def chunk_of(tensors: Mapping[str, Tensor]) -> RowChunk:
        scores = tensors["scores"][:, score_column] if "scores" in tensors else None
        if scores is not None:
            scores = oldest - scores + 1 if is_by_age else scores.clone()
        states = dict(
            zip(names, tensors["states"].chunk(len(names), 1), strict=True) if names else ()
        )
        if is_row_wise:
            states = {name: state.squeeze(1) for name, state in states.items()}
        return RowChunk(tensors["keys"], tensors["rows"], states, scores)

    what = f"table {table} in {storage.url}"
    return source_of_columns(parts, chunk_of, what=what, chunk_bytes=chunk_bytes)


def open_dynamicemb_counts(
    path: str | Path, table: str, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[KeyCounts]:
    """Admission counts of a table that ``DynamicEmbDump`` wrote with ``counter=True``: how often
    keys were seen that have no rows yet; checked before the first one is read.

    Args:
        path, table, chunk_bytes: as for :func:`open_dynamicemb_rows`.

    Raises:
        FileNotFoundError, ValueError: as :func:`open_dynamicemb_rows` does.
    """
    storage = Storage(path)
    files = _files(storage, table, (_COUNTER_KEYS, _COUNTS))
    keys = _raw(storage, files[_COUNTER_KEYS], torch.int64)
    counts = _raw(storage, files[_COUNTS], torch.int64)
    parts = [{"keys": k, "counts": c} for k, c in zip(keys, counts, strict=True)]
    check_columns(parts, f"admission counts of table {table} in {storage.url}", chunk_bytes)
    return (KeyCounts(t["keys"], t["counts"]) for t in read_columns(parts, chunk_bytes))


def _raw(
    storage: Storage, paths: Sequence[str], dtype: torch.dtype, width: int | None = None
) -> list[Column]:
    """A column of each rank; ``width`` None is a number a row."""
    return [raw_column(storage, path, dtype, () if width is None else (width,)) for path in paths]


def _files(
    storage: Storage, table: str, items: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Paths of a table's files by item, in the order of the ranks that wrote them.

    Raises:
        FileNotFoundError: if one is missing, also of an optional item that other ranks have.
        ValueError: if there are files of several numbers of ranks.
    """
    names = storage.names()
    found = [match for match in map(_FILE.fullmatch, names) if match is not None]
    mine = [m for m in found if m["table"] == table and m["item"] in (*items, *optional)]
    if not mine:
        tables = sorted({m["table"] for m in found if m["item"] in items})
        raise FileNotFoundError(
            f"folder {storage.url} must hold {items[0]} of table {table}, and holds "
            f"those of {tables}"
        )
    sizes = sorted({int(m["world_size"]) for m in mine})
    if len(sizes) > 1:
        raise ValueError(
            f"folder {storage.url} must hold one dump of table {table}, and has files of "
            f"{sizes} ranks; remove those of the older one"
        )
    present = {m["item"] for m in mine}
    paths = {}
    for item in (*items, *(item for item in optional if item in present)):
        of_ranks = [f"{table}_{item}.rank_{r}.world_size_{sizes[0]}" for r in range(sizes[0])]
        for name in of_ranks:
            if name not in names:
                raise FileNotFoundError(
                    f"folder {storage.url} must hold a file {item} of table {table} for each of "
                    f"{sizes[0]} ranks, and lacks {name}"
                )
        paths[item] = [storage.path(name) for name in of_ranks]
    return paths


def _arguments(storage: Storage, table: str) -> dict[str, object]:
    path = storage.path(f"{table}_opt_args.json")
    if not storage.exists(path):
        raise FileNotFoundError(
            f"folder {storage.url} must hold {table}_opt_args.json, which says what scores and "
            "states are, and lacks it"
        )
    try:
        arguments = json.loads(storage.read(path))
    except ValueError as error:
        raise ValueError(f"file {path} must be JSON, and is not: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"file {path} must hold one object, got {type(arguments).__name__}")
    return arguments


def _numbers_a_row(storage: Storage, paths: Sequence[str], keys: Sequence[Column]) -> int:
    """Scores of each row, by the sizes of files; 1 where there are no rows."""
    num_rows = sum(column.num_rows for column in keys)
    num_bytes = sum(storage.num_bytes(path) for path in paths)
    # One that does not fit is named where the files are compared with the keys'.
    return max(num_bytes // (8 * num_rows), 1) if num_rows else 1


def _chosen_column(table: str, score_column: int | None, num_scores: int) -> int:
    if score_column is None and num_scores == 1:
        return 0
    if score_column is None or not 0 <= score_column < num_scores:
        raise ValueError(
            f"score_column must be in [0, {num_scores}), the scores of each row of table {table}, "
            f"got {score_column}"
        )
    return score_column


def _greatest_age(
    table: str, parts: Sequence[Columns], score_column: int | None, chunk_bytes: int
) -> int:
    """The greatest of all ages; 0 where there are no rows.

    Raises:
        ValueError: if one is negative.
    """
    greatest = 0
    for part in parts:
        alone = {name: part[name] for name in ("keys", "scores")}
        for tensors in read_columns([alone], chunk_bytes):
            ages = tensors["scores"][:, score_column]
            if not len(ages):
                continue
            if ages.min() < 0:
                raise ValueError(
                    f"file {part['scores'].path} must hold ages, since table {table} evicts by "
                    f"time, and none is negative; got {int(ages.min())}"
                )
            greatest = max(greatest, int(ages.max()))
    return greatest


def _state_names(storage: Storage, table: str, arguments: Mapping[str, object]) -> tuple[str, ...]:
    kind = str(arguments.get("opt_type"))
    if kind not in _STATE_NAMES:
        raise ValueError(
            f"opt_type of {table}_opt_args.json in {storage.url} must be one of "
            f"{list(_STATE_NAMES)}, got {kind!r}; remove the files {table}_{_STATES}.* to read "
            "rows without their states"
        )
    return _STATE_NAMES[kind]


def _check_empty(storage: Storage, paths: Sequence[str]) -> None:
    for path in paths:
        if storage.num_bytes(path):
            raise ValueError(
                f"file {path} must be empty, since sgd has no states, got "
                f"{storage.num_bytes(path)} bytes"
            )
