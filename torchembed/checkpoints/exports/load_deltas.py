"""A model brought up to date by numbered exports of it."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchembed.checkpoints.exports.delta_folder import (
    CHANGES,
    DESCRIPTION,
    FORMAT,
    REST,
    ROWS,
    Description,
    is_of_tables,
)
from torchembed.checkpoints.exports.model_changes import dynamic_tables
from torchembed.checkpoints.exports.whole_model import import_tables
from torchembed.checkpoints.files.checked_json import from_checked_json
from torchembed.checkpoints.files.numbered_folders import NumberedFolders, numbered_folders
from torchembed.checkpoints.files.storage import FileDigest, Storage
from torchembed.checkpoints.files.tensor_file import open_safetensors
from torchembed.checkpoints.rows.model_rows import load_rows
from torchembed.checkpoints.rows.row_folder import open_rows
from torchembed.checkpoints.rows.row_source import RowSource
from torchembed.core import ranks
from torchembed.core.ranks.collective_errors import decide_on_first_rank, raise_on_all_ranks
from torchembed.tables import (
    HashIndex,
    Table,
    clear_ids,
    erase_ids,
    meta_rows_in_state_dicts,
    table_of,
    write_numbered_rows,
)


@torch.no_grad()
def load_deltas(model: nn.Module, path: str | Path, *, after: int | None = None) -> tuple[int, int]:
    """Bring ``model`` up to the last export of a :class:`~torchembed.checkpoints.DeltaFolder`, in
    place, between two steps; collective. Optimizer states stay as they are.

    Dynamic tables get the ids and rows of the last whole export and of what follows it, in order,
    or, where ``after`` is later, of what follows that alone. The model may be sharded otherwise
    than the one that was exported, and its tables may be larger or smaller. Of rows that ids share,
    which each rank has of its own, other numbers of ranks take the mean.

    Args:
        path: of the exports, or its URL, which all ranks see.
        after: number of the export that the model holds already; None for none.

    Returns:
        The number of the last export, for ``after`` of the next call; and how many ids found no
        row, since those of greater scores fill a table.

    Raises:
        FileNotFoundError: if there is no export, or one that is needed is missing.
        ValueError: if a file is not as it was written, or a name, shape or dtype is not the
            model's. Nothing is changed in either case.
    """
    what = f"load the exports in {path}"
    folders = numbered_folders(path, DESCRIPTION)
    exports = raise_on_all_ranks(lambda: _exports_to_read(path, folders, after), what)
    last = exports[-1].number if exports else after
    assert last is not None
    if not exports:
        return last, 0
    # All is opened and checked before anything changes.
    opened = [_open_tables(model, folders.folder(e.number), e, what) for e in exports]
    rest = _open_rest(model, folders.folder(last), exports[-1], what)
    num_left_out = sum(_load_tables(model, of_export, what) for of_export in opened)
    _load_rest(model, rest, what)
    return last, num_left_out


def _exports_to_read(
    path: str | Path, folders: NumberedFolders, after: int | None
) -> list[Description]:
    """The exports to read, in order; none where the last one is ``after``.

    Raises:
        FileNotFoundError: if there is none, or one that is needed is missing.
    """
    there = folders.numbers()
    if not there or (after is not None and there[-1] < after):
        raise FileNotFoundError(
            f"path must hold exports of a model{'' if after is None else f' from {after} on'}, and "
            f"{path} holds {there or 'none'}; give the folder of a DeltaFolder"
        )
    found: list[Description] = []
    number = there[-1]
    while (after is None or number > after) and (not found or not found[-1].is_whole):
        if number not in there:
            raise FileNotFoundError(
                f"path must hold all exports from a whole one on, and {path} lacks number {number} "
                f"before {number + 1}; copy it there"
            )
        found.append(_read_description(folders.folder(number), number))
        number -= 1
    return found[::-1]


def _read_description(folder: str, number: int) -> Description:
    storage = Storage(folder)
    file = storage.path(DESCRIPTION)
    content = storage.read(file)
    try:
        fields = from_checked_json(content)
        version = fields.pop("format")
        if version == FORMAT:
            files = {name: FileDigest(*digest) for name, digest in fields.pop("files").items()}
            return Description(**fields, files=files)._replace(number=number)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"file {file} is corrupt: export again ({error})") from None
    raise ValueError(f"file {file} has format {version}, and this release knows {FORMAT}")


class _Tables(NamedTuple):
    """Changes of the dynamic tables in an export."""

    is_whole: bool
    rows: dict[str, RowSource]
    """By the weights of tables."""
    changes: dict[str, Tensor]


class _Rest(NamedTuple):
    """All that is not of dynamic tables."""

    own: dict[str, Tensor]
    """The model's own tensors of it, by name."""
    static: list[str]
    """Names of the weights of static tables, which ranks may share."""
    found: dict[str, Tensor]


def _open_tables(model: nn.Module, folder: str, export: Description, what: str) -> _Tables:
    """The changes in an export, checked; collective."""
    tables = dynamic_tables(model)
    known = {name for of_rank in ranks.gather_objects(list(tables)) for name in of_rank}
    if known != set(export.tables):
        raise ValueError(
            f"model must have the dynamic tables of {folder}, {sorted(export.tables)}, got "
            f"{sorted(known)}"
        )
    decide_on_first_rank(lambda: _check_file(folder, CHANGES, export), what)

    def read() -> _Tables:
        changes = open_safetensors(f"{folder}/{CHANGES}")
        rows = {name: open_rows(f"{folder}/{ROWS}/{name}") for name in export.tables}
        for name, table in tables.items():
            _num_shared(name, table, changes[f"{name}.shared"])
        return _Tables(export.is_whole, rows, changes)

    return raise_on_all_ranks(read, what)


def _check_file(folder: str, name: str, export: Description) -> None:
    """Raise ``ValueError`` where a file of an export is not as it was written."""
    storage = Storage(folder)
    storage.check_unchanged(storage.path(name), export.files[name], "export again")


def _load_tables(model: nn.Module, export: _Tables, what: str) -> int:
    tables, num_left_out = dynamic_tables(model), 0
    for name, rows in export.rows.items():
        table = tables.get(name)
        if table is not None and export.is_whole:
            clear_ids(table)
        elif table is not None:
            erase_ids(table, export.changes[f"{name}.deleted"])
        num_left_out += load_rows(model, name, rows)
        if table is not None:
            _load_shared(name, table, export.changes[f"{name}.shared"])
    return num_left_out


def _num_shared(name: str, table: Table, shared: Tensor) -> int:
    """The number of rows that ids share in a table's part on this rank, of which an export has
    ``shared``, ``[W * k, D]`` of its parts.

    Raises:
        ValueError: where the exported table had other numbers of them.
    """
    num_rows = table.num_rows - _first_shared(table)
    if bool(num_rows) != bool(len(shared)) or (num_rows and len(shared) % num_rows):
        raise ValueError(
            f"table {name} must have as many hashed rows as the exported one, which has "
            f"{len(shared)} on all ranks, got {num_rows} on each"
        )
    return num_rows


def _first_shared(table: Table) -> int:
    index = table.group.index
    assert isinstance(index, HashIndex)
    return index.capacity(table.group.tables.index(table))


def _load_shared(name: str, table: Table, shared: Tensor) -> None:
    """Give a table the rows that ids share."""
    num_rows, first = _num_shared(name, table, shared), _first_shared(table)
    if not num_rows:
        return
    parts = shared.view(-1, num_rows, table.spec.dim)
    place, num_shares = table.id_share
    of_part = parts[place] if len(parts) == num_shares else parts.double().mean(0)
    columns = slice(table.first_column, table.first_column + table.num_columns)
    write_numbered_rows(table, torch.arange(first, table.num_rows), of_part[:, columns], {})


def _open_rest(model: nn.Module, folder: str, export: Description, what: str) -> _Rest:
    """All that is not of dynamic tables in an export, checked; collective."""
    decide_on_first_rank(lambda: _check_file(folder, REST, export), what)
    file = f"{folder}/{REST}"
    found = raise_on_all_ranks(lambda: open_safetensors(file), what)
    here = {
        name: [table.spec.num_ids, table.spec.dim]
        for name, parameter in model.named_parameters()
        if (table := table_of(parameter)) is not None and table.spec.num_ids is not None
    }
    static = {
        name: shape for of_rank in ranks.gather_objects(here) for name, shape in of_rank.items()
    }

    def read() -> _Rest:
        with meta_rows_in_state_dicts():
            state = model.state_dict(keep_vars=True)
        own = {n: t for n, t in state.items() if isinstance(t, Tensor) and n not in static}
        own = {n: t for n, t in own.items() if not is_of_tables(n, export.tables)}
        differing = sorted((own.keys() | static.keys()) ^ found.keys())
        if differing:
            raise ValueError(
                f"model must have the tensors of {file}, and these differ: {differing}"
            )
        for name, shape in static.items():
            if list(found[name].shape) != shape:
                raise ValueError(
                    f"table {name} must have the rows of {file}, {list(found[name].shape)}, got "
                    f"{shape}"
                )
        for name, tensor in own.items():
            if hasattr(tensor, "placements"):  # a DTensor
                raise ValueError(
                    f"parameter {name} must be whole on each rank to be loaded from {file}, and is "
                    "a DTensor; load it by torch.distributed.checkpoint"
                )
            if tensor.shape != found[name].shape or tensor.dtype != found[name].dtype:
                raise ValueError(
                    f"{name} must be {tensor.dtype} {list(tensor.shape)} as the model's, and is "
                    f"{found[name].dtype} {list(found[name].shape)} in {file}"
                )
        return _Rest(own, sorted(static), found)

    return raise_on_all_ranks(read, what)


def _load_rest(model: nn.Module, rest: _Rest, what: str) -> None:
    """Give all that is not of dynamic tables its values; collective."""

    def copy() -> None:
        for name, tensor in rest.own.items():
            tensor.data.copy_(rest.found[name])

    raise_on_all_ranks(copy, what)
    import_tables(model, {name: rest.found[name] for name in rest.static})
