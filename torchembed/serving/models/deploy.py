"""``deploy``: a trained model becomes a folder that servers load."""

import contextlib
import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from torchembed.checkpoints import RowSource, export_rows, model_rows
from torchembed.checkpoints.files.storage import Storage
from torchembed.core import ranks
from torchembed.core.ranks.collective_errors import decide_on_first_rank, raise_on_all_ranks
from torchembed.core.urls import is_url
from torchembed.modules.dense_part.errors import DeployError
from torchembed.modules.dense_part.forms import DenseInput
from torchembed.modules.dense_part.recording import Recording
from torchembed.modules.dense_part.table_modules import TableSource
from torchembed.modules.dense_part.take_apart import TakenApart, take_apart
from torchembed.serving.datatypes import DATATYPES, datatype_of
from torchembed.serving.models.dense_program import (
    PROGRAM_FILE,
    WEIGHTS_FILE,
    program_bytes,
    write_weights,
)
from torchembed.serving.models.description import DeployedTable, FileForm, ModelDescription
from torchembed.serving.models.model_folder import (
    DESCRIPTION_FILE,
    TABLES_FOLDER,
    is_model_name,
    version_folder,
)
from torchembed.serving.models.partial_folder import empty_partial_folder
from torchembed.tables import RowChunk


def deploy(
    model: nn.Module,
    folder: str | Path,
    *,
    name: str,
    version: int,
    examples: object,
    output: str | Mapping[str, str] = "as_it_is",
    output_names: Sequence[str | None] | None = None,
    tables: Mapping[str, RowSource] | None = None,
    store_names: Mapping[str, str] | None = None,
    defaults: Mapping[str, float] | None = None,
    dense_dtype: torch.dtype | None = None,
) -> Path:
    """Write a version of ``model`` into a folder of models for a server, completely or not at all.

    The model runs once with the examples, in evaluation mode, to find which arguments its tables
    look up; everything else becomes a program of ``torch.export``. Tables, static and dynamic ones,
    are written as rows by id, from any storage. If ranks share the tables, every rank calls with
    the same arguments, except examples of its own, of equal form, and rank 0 writes the rest. The
    model is not changed.

    Args:
        folder: the local folder of all models; the version is ``<folder>/<name>/<version>``.
        version: a positive integer below 2**63 that the model does not have there yet.
        examples: the arguments of ``forward``, a tuple if there are several, with at least 2
            samples. Dense inputs have a row for each sample. Ids are sparse features, or tensors
            ``[B]`` or ``[B, n]`` that an ``Embedding`` or ``EmbeddingBag`` is called with, whole or
            by columns.
        output: ``"sigmoid"`` turns logits into probabilities, ``"as_it_is"`` nothing; or a mapping
            from names of outputs to these.
        output_names: a name for each tensor of the result, or for each column of a single tensor;
            a name None leaves the tensor out, such as a loss. None takes the result's own names.
        tables: rows to write in place of the model's own, by the name of the table, as
            :func:`~torchembed.checkpoints.open_rows`, ``open_hugectr_rows`` and
            ``open_safetensors_rows`` give them.
        store_names: a common name for each table that several models share.
        defaults: the number that ids without a row are looked up as, in all columns, by the name of
            the table. Needed if the model looks them up as something other than one number.
        dense_dtype: float16 or bfloat16, which the dense part is stored and computed in: its
            weights, and those that servers are sent later, its inputs and the vectors of tables
            are rounded to it. Answers are float32. None takes the model's own dtypes. Rows of
            tables are as they are, and cached as servers choose.

    Returns:
        The folder of the version.

    Raises:
        DeployError: if the model cannot be served; the message says why.
        ValueError: if ``folder`` is a URL.
        FileExistsError: if the version exists, or another process is writing it.
        OSError: if writing fails.
    """
    what = f"deploy version {version} of {name}"
    raise_on_all_ranks(lambda: _check_folder(folder), what)
    target = version_folder(folder, name, version)
    partial = target.with_name(f".{target.name}.partial")
    raise_on_all_ranks(lambda: _check_name(name, version), what)
    raise_on_all_ranks(lambda: _check_dtype(dense_dtype), what)
    parts = take_apart(model, examples, output, output_names, what, dense_dtype)
    recording, dense = parts.recording, parts.dense
    sources, shared, numbers = dict(tables or {}), dict(store_names or {}), dict(defaults or {})
    raise_on_all_ranks(lambda: _check_tables(recording, sources, shared, numbers), what)

    def begin() -> None:
        if target.exists():
            raise FileExistsError(f"version must not be there yet, and {target} is; take another")
        assert dense is not None
        _check_inputs(dense.inputs)
        claims.enter_context(empty_partial_folder(partial))
        (partial / PROGRAM_FILE).write_bytes(program_bytes(dense.program))
        write_weights(dense.weights, partial / WEIGHTS_FILE)

    def end() -> None:
        description = _description(name, version, parts, deployed, partial)
        description_file = partial / DESCRIPTION_FILE
        description_file.write_bytes(description.to_bytes())
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        partial.rename(target)
        _sync(target.parent)

    with contextlib.ExitStack() as claims:
        decide_on_first_rank(begin, what)
        deployed = [
            DeployedTable(
                name=table,
                store_name=shared.get(table),
                dim=source.dim,
                num_rows=_export_table(parts.model, source, sources.get(table), partial, what),
                default=source.default(numbers.get(table)),
                num_ids=source.num_ids,
                bad_ids=source.bad_ids,
            )
            for table, source in recording.tables.items()
        ]
        decide_on_first_rank(end, what)
    return target


def _description(
    name: str,
    version: int,
    parts: TakenApart,
    tables: Sequence[DeployedTable],
    folder: Path,
) -> ModelDescription:
    dense, storage = parts.dense, Storage(folder)
    assert dense is not None
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        place = str(path.relative_to(folder))
        # Rows have the checksums of their own index.
        if not place.endswith(".safetensors") or place == WEIGHTS_FILE:
            digest = storage.digest(storage.path(place))
            assert digest.crc32 is not None
            files[place] = FileForm(num_bytes=digest.num_bytes, crc32=digest.crc32)
    description = ModelDescription(
        name=name,
        version=version,
        inputs=dense.inputs,
        features=tuple(parts.features()),
        lookups=tuple(parts.recording.lookups),
        tables=tuple(tables),
        weights=tuple(dense.weights),
        arguments=dense.arguments,
        outputs=dense.outputs,
        files=files,
    )
    names = [form.name for form in description.form().inputs]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise DeployError(f"inputs must have different names, and several are named {twice}")
    return description


def _export_table(
    model: nn.Module, source: TableSource, rows: RowSource | None, folder: Path, what: str
) -> int:
    """Write the rows of a table; returns how many all ranks together wrote."""
    chunks = iter(())
    if rows is None:
        chunks = model_rows(model, source.weight_name, with_states=False)
    elif ranks.rank() == 0:
        chunks = iter(rows)
    first = raise_on_all_ranks(lambda: next(chunks, None), what)
    if not any(ranks.gather_objects(first is not None)) and ranks.rank() == 0:
        # No rank has a row, as of a dynamic table that was never trained.
        keys = torch.empty(0, dtype=torch.int64)
        first = RowChunk(keys, torch.empty(0, source.dim), {})
    counts = [0]

    def counted() -> Iterator[RowChunk]:
        for chunk in itertools.chain(() if first is None else (first,), chunks):
            counts[0] += len(chunk.keys)
            yield RowChunk(chunk.keys, chunk.rows, {})

    export_rows(counted(), folder / TABLES_FOLDER / source.name)
    return sum(ranks.gather_objects(counts[0]))


def _check_folder(folder: str | Path) -> None:
    if is_url(folder):
        raise ValueError(
            f"folder must be a local folder, got {folder}; deploy to one and copy it there"
        )


def _check_name(name: str, version: int) -> None:
    if not is_model_name(name):
        raise DeployError(
            f"name must be 1 to 120 letters, digits, '.', '_' or '-', not '.' or '-' first, got "
            f"{name!r}"
        )
    if isinstance(version, bool) or not isinstance(version, int) or not 0 < version < 2**63:
        raise DeployError(f"version must be a positive integer below 2**63, got {version!r}")


def _check_dtype(dense_dtype: torch.dtype | None) -> None:
    if dense_dtype not in (None, torch.float16, torch.bfloat16):
        raise DeployError(
            f"dense_dtype must be torch.float16, torch.bfloat16 or None, got {dense_dtype}"
        )


def _check_inputs(inputs: Sequence[DenseInput]) -> None:
    for each in inputs:
        try:
            datatype_of(np.dtype(each.dtype))
        except TypeError:
            raise DeployError(
                f"input {each.name} must have one of the datatypes that requests have, "
                f"{', '.join(DATATYPES)}, got {each.dtype}; convert it in the model's forward"
            ) from None


def _check_tables(
    recording: Recording,
    sources: Mapping[str, RowSource],
    shared: Mapping[str, str],
    defaults: Mapping[str, float],
) -> None:
    for argument, given in (("tables", sources), ("store_names", shared), ("defaults", defaults)):
        unknown = sorted(set(given) - set(recording.tables))
        if unknown:
            raise DeployError(
                f"{argument} must name tables of the model, {list(recording.tables)}, got {unknown}"
            )
    for name, source in sources.items():
        dim = recording.tables[name].dim
        if source.embedding_dim != dim:
            raise DeployError(
                f"rows of table {name} must have {dim} columns, got {source.embedding_dim}"
            )
    for name, table in recording.tables.items():
        default = table.default(defaults.get(name))
        if not abs(default) <= torch.finfo(torch.float32).max:
            raise DeployError(f"default of table {name} must be a number in float32, got {default}")
    for name, store_name in shared.items():
        if not isinstance(store_name, str) or not store_name:
            raise DeployError(
                f"store name of table {name} must be a string that is not empty, got {store_name!r}"
            )
    if len(set(shared.values())) != len(shared):
        raise DeployError(
            f"store_names must be different for different tables of a model, got {dict(shared)}"
        )
    _check_folder_names(recording.tables)


def _check_folder_names(tables: Collection[str]) -> None:
    """Raise ``DeployError`` for tables whose rows cannot be in folders of their names."""
    for name in tables:
        is_none = any(not part or len(part.encode()) > 255 for part in name.split("/"))
        if is_none or "\0" in name:
            raise DeployError(
                f"tables must have names that folders can have, of up to 255 bytes, got {name!r}; "
                "rename it"
            )
        inner = [other for other in tables if other.startswith(f"{name}/")]
        if inner:
            raise DeployError(
                f"tables must have folders of their own, and that of {inner[0]!r} is in that of "
                f"{name!r}; rename one"
            )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
