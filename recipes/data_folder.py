"""Search for data sets, which nobody may redistribute."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from recipes.ranks import check_batch_size
from torchembed.data.data_path import DataPath, data_path

_BESIDE_THE_CHECKOUT = Path(__file__).resolve().parents[2] / "shared" / "data"


class DataConfig(Protocol):
    """A config of a run on such data."""

    @property
    def data(self) -> str | Path | None: ...
    @property
    def batch_size(self) -> int: ...


def check_data(files: Mapping[str, Sequence[str]], config: DataConfig, num_ranks: int) -> None:
    """Look for the files of a config, and have its batch divided over ``num_ranks``.

    Raises:
        FileNotFoundError: as :func:`find_data`.
        ValueError: as :func:`~recipes.ranks.check_batch_size`.
    """
    check_batch_size(config.batch_size, num_ranks)
    find_data(files, config.data)


def find_data(files: Mapping[str, Sequence[str]], data: DataPath | str | None) -> DataPath:
    """The path of the first of ``files`` that is there, such as ``ml-1m/ratings.dat``.

    Looks in the folder ``data`` (which may be ``ml-1m`` itself) if one is given, else in that of
    the environment variable ``TORCHEMBED_DATA``, else in ``../shared/data`` beside the checkout.

    Args:
        files: one data set in each of the formats that a recipe reads, and the names of the files
            that it needs beside that one.
        data: the folder, or its URL.

    Raises:
        FileNotFoundError: where none is there, or one beside it is not; says what is needed, and
            how to name the folder.
    """
    root = data_path(data or os.environ.get("TORCHEMBED_DATA", _BESIDE_THE_CHECKOUT))
    for file, names in files.items():
        for path in (root / file, root / Path(file).name):
            if path.is_file():
                _check_beside(path, names)
                return path
    raise FileNotFoundError(
        f"{' or '.join(files)} is needed and is not in {root}; name the folder that holds it with "
        "--data, or in the environment variable TORCHEMBED_DATA"
    )


def _check_beside(path: DataPath, names: Sequence[str]) -> None:
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{path} is read with {' and '.join(names)} beside it, and {path.parent} lacks "
            f"{' and '.join(missing)}; put {'them' if len(missing) > 1 else 'it'} there, or name "
            "another folder with --data"
        )
