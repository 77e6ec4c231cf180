"""MovieLens-1M as sequences: what each user has rated, in order of time."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recipes.ctr.ml1m import MOVIES, RATINGS, read_table
from recipes.ctr.number_file import read_numbers
from torchembed.data.data_path import DataPath

FILES: Mapping[str, Sequence[str]] = dict.fromkeys(
    ("ml-1m/ratings.dat", "ml-1m/ratings.npz"), ("movies.dat",)
)


class Interactions(NamedTuple):
    """The items of all users, one user behind the other, the oldest first."""

    items: Tensor
    """int64 ``[N]``, from 0 to ``num_items``."""
    offsets: Tensor
    """int64 ``[U + 1]``: where users begin and end."""
    times: Tensor | None
    """int64 ``[N]``, in seconds; None where the data have the order alone."""
    num_items: int

    @property
    def num_users(self) -> int:
        """Users ``U``."""
        return len(self.offsets) - 1


def read(path: DataPath) -> Interactions:
    """All ratings of ``path``, whatever they are, with ``movies.dat`` beside it.

    Items are the places of movies in ``movies.dat``, rated or not. Ratings of a user at one time
    stay in the order of the file.

    Args:
        path: ``ratings.dat``; or ``ratings.npz`` with arrays ``user``, ``movie`` and ``time_rank``,
            the order of a user's ratings.

    Raises:
        FileNotFoundError: where one of the files is missing.
        ValueError: for a malformed line, or a movie that is not in ``movies.dat``; names file and
            line.
    """
    if path.suffix == ".npz":
        with path.open("rb") as file, np.load(file) as arrays:
            names = ("user", "movie", "time_rank")
            user, movie, time = (arrays[name].astype(np.int64) for name in names)
    else:
        user, movie, _, time = read_numbers(path, RATINGS, separator="::").T
    movies = np.array(
        [int(number) for number, *_ in read_table(path.with_name("movies.dat"), MOVIES)]
    )
    items = np.searchsorted(movies, movie).clip(max=len(movies) - 1)
    if (unknown := movies[items] != movie).any():
        row = int(unknown.argmax())
        raise ValueError(
            f"{path}, line {row + 1}: must be of a movie in movies.dat, and {movie[row]} is not "
            "there"
        )
    order = np.lexsort((time, user))  # stable
    _, counts = np.unique(user, return_counts=True)
    return Interactions(
        items=torch.from_numpy(items[order]),
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])),
        times=None if path.suffix == ".npz" else torch.from_numpy(time[order]),
        num_items=len(movies),
    )
