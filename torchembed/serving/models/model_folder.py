"""The folder of a version: where its parts are, and whether they are as they were written."""

import re
from collections.abc import Sequence
from pathlib import Path

from torchembed.checkpoints import RowSource, open_hugectr_rows, open_rows
from torchembed.checkpoints.files.storage import FileDigest, Storage
from torchembed.serving.models.description import ModelDescription
from torchembed.serving.models.errors import ModelFolderError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,119}")
DESCRIPTION_FILE = "model.json"
TABLES_FOLDER = "tables"
_KEY_BYTES = 8
_CHUNK_BYTES = 1 << 24
"""Of rows that are read at a time, beside which some copies of them are made."""


def version_folder(folder: str | Path, name: str, version: int) -> Path:
    """The folder of a version of a model in the folder of all models."""
    return Path(folder) / name / str(version)


def versions_in(folder: str | Path, name: str) -> list[int]:
    """The versions of a model that are whole, ascending; none where there is no such model."""
    of_model = Path(folder) / name
    found = of_model.iterdir() if of_model.is_dir() else ()
    numbers = (int(path.name) for path in found if _is_version(path))
    return sorted(numbers)


def models_in(folder: str | Path) -> list[str]:
    """The models that have a version, in alphabetical order. Folders of other names than models
    may have, as ``lost+found``, are not looked into."""
    root = Path(folder)
    paths = root.iterdir() if root.is_dir() else ()
    names = (path.name for path in paths if is_model_name(path.name) and path.is_dir())
    return sorted(name for name in names if versions_in(root, name))


def is_model_name(name: str) -> bool:
    """True for 1 to 120 letters, digits, '.', '_' and '-', not '.' or '-' first."""
    return _NAME.fullmatch(name) is not None


def _is_version(path: Path) -> bool:
    is_number = path.name.isascii() and path.name.isdigit() and not path.name.startswith("0")
    return is_number and (path / DESCRIPTION_FILE).is_file()


def read_description(folder: str | Path) -> ModelDescription:
    """What the folder of a version says of it; its other files are not looked at.

    Raises:
        ModelFolderError: where it is damaged, or of a later format.
    """
    path = Path(folder) / DESCRIPTION_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelFolderError(
            f"{folder} must be a folder that deploy() wrote, and its {DESCRIPTION_FILE} cannot be "
            f"read: {error}"
        ) from None
    return ModelDescription.parse(content, path)


def check_files(folder: str | Path, description: ModelDescription) -> None:
    """Raise ``ModelFolderError`` where a file beside rows is not as it was written."""
    storage = Storage(folder)
    for place, form in description.files.items():
        wanted = FileDigest(form.num_bytes, form.crc32)
        try:
            storage.check_unchanged(storage.path(place), wanted, "deploy again")
        except OSError as error:
            raise ModelFolderError(f"{folder} lacks its file {place}: {error}") from None
        except ValueError as error:
            raise ModelFolderError(str(error)) from None


def open_table(folder: str | Path, table: str) -> RowSource:
    """The rows of a table, checked.

    Raises:
        ModelFolderError: where they are not as they were written.
    """
    try:
        return open_rows(Path(folder) / TABLES_FOLDER / table, chunk_bytes=_CHUNK_BYTES)
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"table {table} of {folder} is corrupt: {error}") from error


def open_hugectr_table(folders: Sequence[Path], table: str, dim: int) -> RowSource:
    """The rows of a table in folders of HugeCTR, checked.

    Raises:
        ValueError: where they are not there, or not rows of ``dim`` columns.
    """
    try:
        return open_hugectr_rows(folders, embedding_dim=dim, chunk_bytes=_CHUNK_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(f"rows of table {table} cannot be read: {error}") from error


def num_hugectr_rows(folders: Sequence[Path], table: str) -> int:
    """The number of rows of a table in folders of HugeCTR, by the sizes of their files.

    Raises:
        ValueError: where they are not there.
    """
    try:
        return sum((Path(folder) / "key").stat().st_size for folder in folders) // _KEY_BYTES
    except OSError as error:
        raise ValueError(f"rows of table {table} cannot be read: {error}") from error
