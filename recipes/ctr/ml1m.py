"""MovieLens-1M: does a user like a movie?

The protocol is RecBole's (https://recbole.io): ratings of 3 are dropped, 4 and 5 are likes, and
rows are divided at random, 8 : 1 : 1, anew for each seed.
"""

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.ctr.config import CtrConfig
from recipes.ctr.rows import BagEach, OneIdEach, Rows
from recipes.ctr.run import run_seeds
from recipes.ctr.splits import Splits
from recipes.data_folder import find_data
from recipes.result import Result, Stopped

_TITLE_WITH_YEAR = re.compile(r".*\((\d{4})\)")


def config(data: Path | None = None) -> CtrConfig:
    """DCNv2 on MovieLens-1M, mean of three seeds."""
    return CtrConfig(
        data=data,
        embedding_dim=16,
        embedding_std=0.05,
        num_cross_layers=2,
        layer_sizes=(256, 256),
        dropout=0.2,
        learning_rate=0.002,
    )


def run(config: CtrConfig, device: torch.device, output: Path) -> Result | Stopped:
    """Train on random divisions of the ratings."""
    rows = read(find_data("ml-1m/ratings.npz", config.data).parent)
    return run_seeds(config, lambda seed: divide(rows, seed), device, output)


def divide(rows: Rows, seed: int) -> Splits:
    """Eight tenths of the rows to train, one to validate and one to test, drawn with ``seed``."""
    num_rows = len(rows.labels)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    train, validation, test = order.tensor_split([num_rows * 8 // 10, num_rows * 9 // 10])
    return Splits(rows, train, validation, test)


def read(folder: Path) -> Rows:
    """The ratings other than 3 in ``folder``: ``ratings.npz``, ``users.dat`` and ``movies.dat``.

    Genres are a bag for each movie; all other fields have one id for each rating.
    """
    with np.load(folder / "ratings.npz") as arrays:
        kept = arrays["rating"] != 3
        user, movie, rating = (arrays[name][kept] for name in ("user", "movie", "rating"))
    users, movies = _read_table(folder / "users.dat", 5), _read_table(folder / "movies.dat", 3)
    user, movie = _positions(user, users), _positions(movie, movies)
    _, genders, ages, occupations, _ = zip(*users, strict=True)
    titles, genres = [title for _, title, _ in movies], [names.split("|") for *_, names in movies]
    years = [_year(title) for title in titles]
    genre_names = sorted({name for bag in genres for name in bag})
    return Rows(
        features={
            "user": OneIdEach(num_ids=len(users), ids=user),
            "age": _attribute(ages, user),
            "gender": _attribute(genders, user),
            "occupation": _attribute(occupations, user),
            "movie": OneIdEach(num_ids=len(movies), ids=movie),
            "genres": BagEach(
                num_ids=len(genre_names),
                values=torch.tensor([genre_names.index(name) for bag in genres for name in bag]),
                offsets=torch.tensor([0, *np.cumsum([len(bag) for bag in genres])]),
                which=movie,
            ),
            "release_year": _attribute(years, movie),
        },
        labels=torch.from_numpy(rating >= 4).float(),
    )


def _read_table(path: Path, num_columns: int) -> list[list[str]]:
    """The lines of a file of ``::``-separated columns; the first is a number, and ascends."""
    lines = path.read_text(encoding="latin-1").splitlines()
    table = [line.split("::") for line in lines]
    for number, row in enumerate(table, 1):
        if len(row) != num_columns:
            raise ValueError(f"{path}, line {number}: must have {num_columns} columns, got {row}")
    return table


def _positions(numbers: np.ndarray, table: list[list[str]]) -> Tensor:
    """Where in ``table`` the rows that begin with ``numbers`` are."""
    known = np.array([int(first) for first, *_ in table])
    return torch.from_numpy(np.searchsorted(known, numbers))


def _year(title: str) -> str:
    match = _TITLE_WITH_YEAR.fullmatch(title)
    if match is None:
        raise ValueError(f"a movie's title must end with its year in brackets, got {title!r}")
    return match[1]


def _attribute(values: list[str] | tuple[str, ...], which: Tensor) -> OneIdEach:
    """A feature whose id is the place of ``values[which]`` among the different ``values``."""
    names = sorted(set(values))
    ids = torch.tensor([names.index(value) for value in values])
    return OneIdEach(num_ids=len(names), ids=ids[which])
