"""MovieLens-1M: does a user like a movie?

The protocol is RecBole's (https://recbole.io): ratings of 3 are dropped, 4 and 5 are likes, and
rows are divided at random, 8 : 1 : 1, anew for each seed.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.ctr.config import CtrConfig
from recipes.ctr.models import MODELS
from recipes.ctr.number_file import read_numbers
from recipes.ctr.rows import BagEach, OneIdEach, Rows
from recipes.ctr.run import run_seeds
from recipes.ctr.served import served_clicks
from recipes.ctr.splits import Splits
from recipes.data_folder import find_data
from recipes.result import Result, Stopped
from recipes.served_run import ServedRun
from torchembed.data import text_ids
from torchembed.data.data_path import DataPath

FILES: Mapping[str, Sequence[str]] = dict.fromkeys(
    ("ml-1m/ratings.dat", "ml-1m/ratings.npz"), ("users.dat", "movies.dat")
)
_USERS = ("UserID", "Gender", "Age", "Occupation", "Zip-code")
MOVIES = ("MovieID", "Title", "Genres")
RATINGS = ("UserID", "MovieID", "Rating", "Timestamp")
_TITLE_WITH_YEAR = re.compile(r".*\((\d{4})\)")


DESCRIPTION = """
The data are GroupLens' ml-1m as published: ratings.dat (UserID::MovieID::Rating::Timestamp),
users.dat (UserID::Gender::Age::Occupation::Zip-code) and movies.dat (MovieID::Title::Genres), in
--data or in a folder ml-1m there. Read as well, in place of ratings.dat: ratings.npz with arrays
user, movie and rating.
"""


def _config(kind: type[CtrConfig]) -> Callable[[str | Path | None], CtrConfig]:
    """From the data's folder to the config of a model."""

    def config(data: str | Path | None = None) -> CtrConfig:
        return kind(data=data, embedding_dim=16, embedding_std=0.05, learning_rate=0.002)

    config.__doc__ = f"{kind.title} on MovieLens-1M, mean of three seeds.\n{DESCRIPTION}"
    return config


CONFIGS = {name: _config(kind) for name, kind in MODELS.items()}
"""The config of each model."""


def run(config: CtrConfig, device: torch.device, output: Path) -> Result | Stopped:
    """Train on random divisions of the ratings."""
    rows = read(find_data(FILES, config.data))
    return run_seeds(config, lambda seed: divide(rows, seed), device, output)


def served(config: CtrConfig, output: Path) -> ServedRun:
    """The best seed's model, asked of test rows."""
    rows = read(find_data(FILES, config.data))
    return served_clicks(config, lambda seed: divide(rows, seed), output)


def divide(rows: Rows, seed: int) -> Splits:
    """Eight tenths of the rows to train, one to validate and one to test, drawn with ``seed``."""
    num_rows = len(rows)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    train, validation, test = order.tensor_split([num_rows * 8 // 10, num_rows * 9 // 10])
    return Splits(rows, train, validation, test)


def read(path: DataPath) -> Rows:
    """The ratings other than 3 of ``path``, as likes; otherwise as :func:`read_rated`."""
    rated = read_rated(path, left_out=3)
    return dataclasses.replace(rated, labels=(rated.labels >= 4).float())


def read_rated(path: DataPath, *, left_out: int | None = None) -> Rows:
    """The ratings of ``path`` from 1 to 5, with ``users.dat`` and ``movies.dat`` beside it.

    Genres are a bag for each movie; all other fields have one id for each rating. Raw ids are the
    files' numbers of users and movies, and :func:`~torchembed.data.text_ids` of all else.

    Args:
        path: ``ratings.dat`` or ``ratings.npz``.
        left_out: a rating whose rows are left out; None for none.

    Raises:
        FileNotFoundError: where one of the files is missing.
        ValueError: for a malformed line, a rating that is not 1 to 5, or one of a user or movie
            that is not in its file; names file and line.
    """
    ratings = _read_ratings(path)
    users, movies = (
        read_table(path.with_name(f"{name}.dat"), columns)
        for name, columns in (("users", _USERS), ("movies", MOVIES))
    )
    user, movie = (
        _positions(path, ratings[:, column], table, name)
        for column, table, name in ((0, users, "users.dat"), (1, movies, "movies.dat"))
    )
    rating = torch.from_numpy(ratings[:, 2])
    if left_out is not None:
        kept = rating != left_out
        user, movie, rating = user[kept], movie[kept], rating[kept]
    _, genders, ages, occupations, _ = zip(*users, strict=True)
    genres = [names.split("|") for *_, names in movies]
    years = [_year(path.with_name("movies.dat"), n, row[1]) for n, row in enumerate(movies, 1)]
    genre_names = sorted({name for bag in genres for name in bag})
    return Rows(
        features={
            "user": OneIdEach(raw_ids=_numbers(users), ids=user),
            "age": _attribute(ages, user),
            "gender": _attribute(genders, user),
            "occupation": _attribute(occupations, user),
            "movie": OneIdEach(raw_ids=_numbers(movies), ids=movie),
            "genres": BagEach(
                raw_ids=torch.from_numpy(text_ids(genre_names)),
                values=torch.tensor([genre_names.index(name) for bag in genres for name in bag]),
                offsets=torch.tensor([0, *np.cumsum([len(bag) for bag in genres])]),
                which=movie,
            ),
            "release_year": _attribute(years, movie),
        },
        labels=rating.float(),
    )


def _read_ratings(path: DataPath) -> NDArray[np.int64]:
    """User, movie and rating of each line or row, ``[rows, 3]``."""
    if path.suffix == ".npz":
        with path.open("rb") as file, np.load(file) as arrays:
            names = ("user", "movie", "rating")
            ratings = np.column_stack([arrays[name] for name in names]).astype(np.int64)
    else:
        ratings = read_numbers(path, RATINGS, separator="::")[:, :3]
    bad = (ratings[:, 2] < 1) | (ratings[:, 2] > 5)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(f"{path}, line {row + 1}: Rating must be 1 to 5, got {ratings[row, 2]}")
    return ratings


def read_table(path: DataPath, columns: Sequence[str]) -> list[list[str]]:
    """The lines of a file of ``::``-separated columns; the first is a number, and ascends.

    Raises:
        ValueError: where the file has no lines, or one with other columns or a number that is not
            above that of the line before; names the file, the line and what came.
    """
    with path.open(encoding="latin-1") as file:
        table = [line.rstrip("\n").split("::") for line in file]
    before = 0
    for number, row in enumerate(table, 1):
        if len(row) != len(columns):
            raise ValueError(
                f"{path}, line {number}: must have {len(columns)} columns ({', '.join(columns)}) "
                f"between '::', got {row}"
            )
        if not row[0].isdecimal() or int(row[0]) <= before:
            raise ValueError(
                f"{path}, line {number}: {columns[0]} must be a number above that of the line "
                f"before, {before}, got {row[0]!r}"
            )
        before = int(row[0])
    if not table:
        raise ValueError(f"{path}: must hold lines of {'::'.join(columns)}, got none")
    return table


def _positions(
    path: DataPath, numbers: NDArray[np.int64], table: list[list[str]], name: str
) -> Tensor:
    """Positions of the rows of ``table``, of the file ``name``, that begin with ``numbers``."""
    known = _numbers(table).numpy()
    positions = np.searchsorted(known, numbers).clip(max=len(known) - 1)
    if (unknown := known[positions] != numbers).any():
        row = int(unknown.argmax())
        raise ValueError(
            f"{path}, line {row + 1}: must be of one in {name}, and {numbers[row]} is not there"
        )
    return torch.from_numpy(positions)


def _numbers(table: list[list[str]]) -> Tensor:
    """The numbers that the rows of a table begin with, int64."""
    return torch.tensor([int(first) for first, *_ in table])


def _year(path: DataPath, line: int, title: str) -> str:
    match = _TITLE_WITH_YEAR.fullmatch(title)
    if match is None:
        raise ValueError(
            f"{path}, line {line}: a title must end with its year in brackets, got {title!r}"
        )
    return match[1]


def _attribute(values: list[str] | tuple[str, ...], which: Tensor) -> OneIdEach:
    """A feature whose id is the place of ``values[which]`` among the different ``values``."""
    names = sorted(set(values))
    ids = torch.tensor([names.index(value) for value in values])
    return OneIdEach(raw_ids=torch.from_numpy(text_ids(names)), ids=ids[which])
