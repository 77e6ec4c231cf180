"""Small data sets in the formats of the real ones, which nobody may redistribute."""

import gzip
from pathlib import Path

import numpy as np

GENRES = ("Action", "Comedy", "Drama", "Film-Noir")


def write_frappe(folder: Path) -> Path:
    """BARS' files in ``Frappe_x1/``, 600 rows; the label depends on user and item."""
    sizes = np.array([9, 14, 7, 7, 2, 3, 2, 9, 5, 6])
    generator = np.random.default_rng(0)
    home = folder / "Frappe_x1"
    home.mkdir()
    for part, num_rows in (("train", 400), ("valid", 100), ("test", 100)):
        ids = (generator.random((num_rows, len(sizes))) * sizes).astype(np.int64)
        labels = (ids[:, 0] + ids[:, 1]) % 3 == 0
        # The published files number ids through all fields, and end lines as Windows does.
        rows = np.column_stack([labels, ids + np.cumsum([0, *sizes[:-1]])])
        header = "label,user,item,daytime,weekday,isweekend,homework,cost,weather,country,city"
        lines = [header, *(",".join(map(str, row)) for row in rows.tolist())]
        (home / f"{part}.csv").write_text("".join(f"{line}\r\n" for line in lines), newline="")
    return home / "train.csv"


def write_ml1m(folder: Path) -> Path:
    """GroupLens' files in ``ml-1m/``: 700 ratings, 12 users, 15 movies whose numbers have gaps."""
    generator = np.random.default_rng(0)
    users, movies = np.arange(1, 13), 2 * np.arange(1, 16)
    home = folder / "ml-1m"
    home.mkdir()
    (home / "users.dat").write_text(
        "".join(
            f"{user}::{'FM'[user % 2]}::{(1, 18, 25)[user % 3]}::{user % 4}::5{user:04}\n"
            for user in users
        )
    )
    (home / "movies.dat").write_text(
        "".join(
            f"{movie}::Caf\xe9 ({movie}) ({1990 + movie % 5})::{genres}\n"
            for movie, genres in ((m, "|".join(GENRES[: 1 + m % 4])) for m in movies)
        ),
        encoding="latin-1",
    )
    user, movie = generator.choice(users, 700), generator.choice(movies, 700)
    rating = np.clip((user + movie) % 5 + 1, 1, 5)
    rows = np.column_stack([user, movie, rating, 978_300_000 + np.arange(700)]).tolist()
    path = home / "ratings.dat"
    path.write_text("".join("::".join(map(str, row)) + "\n" for row in rows))
    return path


def write_criteo_text(folder: Path, num_rows: int = 2000) -> Path:
    """``train.txt.gz`` in Kaggle's format, some of it missing; the first count tells the label."""
    generator = np.random.default_rng(0)
    lines = []
    for _ in range(num_rows):
        label = int(generator.random() < 0.3)
        counts = [str(value) for value in generator.integers(0, 50, 13)]
        counts[0] = str(int(generator.integers(0, 20)) + 40 * label)
        ids = [f"{value:08x}" for value in generator.integers(0, 40, 26)]
        counts[5] = ids[7] = ""
        lines.append("\t".join([str(label), *counts, *ids]) + "\n")
    path = folder / "train.txt.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(lines)
    return path


def write_mlperf(folder: Path, num_rows: int = 200) -> Path:
    """Two days of MLPerf's files, with its 26 features and their hotness."""
    from torchembed.data import MLPERF_HOTNESS, MLPERF_TABLE_SIZES

    generator = np.random.default_rng(0)
    for day in range(2):
        dense = generator.random((num_rows, 13), dtype=np.float32)
        np.save(folder / f"day_{day}_dense.npy", dense)
        np.save(folder / f"day_{day}_labels.npy", (dense[:, :1] > 0.6).astype(np.int32))
        arrays = {
            str(feature): generator.integers(0, size, (num_rows, hotness), dtype=np.int32)
            for feature, (size, hotness) in enumerate(
                zip(MLPERF_TABLE_SIZES, MLPERF_HOTNESS, strict=True)
            )
        }
        np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **arrays)  # type: ignore[arg-type]
    return folder
