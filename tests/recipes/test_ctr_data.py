"""Frappe and MovieLens-1M as published: every number arrives, and bad lines are named."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.ctr import frappe, ml1m
from recipes.ctr.config import CtrConfig
from recipes.ctr.models import DCNv2Config
from recipes.ctr.rows import Rows
from recipes.ctr.run import build_model
from recipes.ctr.tables import rows_in_tables
from recipes.data_folder import find_data
from recipes.dynamic import Eviction, table_size
from recipes.train import parse
from tests.support import made_data
from torchembed.data import text_ids


def assert_same_rows(got: Rows, expected: Rows) -> None:
    numbers = torch.arange(len(expected.labels))
    batch, other = got.batch(numbers), expected.batch(numbers)
    assert batch.sparse.keys == other.sparse.keys
    assert torch.equal(batch.sparse.values, other.sparse.values)
    assert torch.equal(batch.labels, other.labels)
    for key, feature in expected.features.items():
        assert got.features[key].num_ids == feature.num_ids


def test_frappe_ids_begin_at_zero_in_each_field(tmp_path: Path) -> None:
    splits = frappe.read(made_data.write_frappe(tmp_path))
    assert [len(part) for part in splits[1:]] == [400, 100, 100]
    batch = splits.rows.batch(splits.train[:50])
    assert batch.sparse.keys == frappe.FIELDS
    assert batch.sparse.hotness == (1,) * 10
    for feature, ids in zip(
        splits.rows.features.values(), batch.sparse.values.split(50), strict=True
    ):
        assert 0 <= int(ids.min()) <= int(ids.max()) < feature.num_ids
    user, item = batch.sparse.values[:50], batch.sparse.values[50:100]
    assert torch.equal(batch.labels, ((user + item) % 3 == 0).float())


def test_frappe_as_arrays_is_the_same(tmp_path: Path) -> None:
    published = made_data.write_frappe(tmp_path)
    arrays = {}
    for part in ("train", "valid", "test"):
        path = published.with_name(f"{part}.csv")
        rows = np.loadtxt(path, np.int64, delimiter=",", skiprows=1)
        arrays[f"{part}_y"], arrays[f"{part}_x"] = rows[:, 0].astype(np.int8), rows[:, 1:]
    np.savez(tmp_path / "frappe_x1r.npz", **arrays)
    splits, expected = frappe.read(tmp_path / "frappe_x1r.npz"), frappe.read(published)
    assert_same_rows(splits.rows, expected.rows)
    assert all(map(torch.equal, splits[1:], expected[1:]))


def test_ml1m_genres_are_the_movies_bags(tmp_path: Path) -> None:
    rows = ml1m.read(made_data.write_ml1m(tmp_path))
    numbers = torch.tensor([3, 0, 11, 3])
    batch = rows.batch(numbers)
    assert batch.sparse.offsets is not None
    assert batch.sparse.keys[4:6] == ("movie", "genres")
    movies = rows.features["movie"].of(numbers)[0].tolist()
    bags = batch.sparse.values.tensor_split(batch.sparse.offsets[1:-1].tolist())[5 * 4 : 6 * 4]
    for movie, bag in zip(movies, bags, strict=True):
        # The movie at position p has the number 2 * (p + 1), and its first genres in order.
        assert bag.tolist() == list(range(1 + 2 * (movie + 1) % 4))
    splits = ml1m.divide(rows, seed=1)
    parts = torch.cat(splits[1:])
    assert torch.equal(parts.sort().values, torch.arange(len(rows.labels)))
    assert len(splits.test) == len(parts) - len(parts) * 9 // 10
    assert not torch.equal(splits.test, ml1m.divide(rows, seed=2).test)


def test_ml1m_labels_and_users_are_those_of_the_lines(tmp_path: Path) -> None:
    path = made_data.write_ml1m(tmp_path)
    rows = ml1m.read(path)
    lines = [list(map(int, line.split("::"))) for line in path.read_text().splitlines()]
    kept = [line for line in lines if line[2] != 3]
    assert rows.labels.tolist() == [float(rating >= 4) for _, _, rating, _ in kept]
    numbers = torch.arange(len(kept))
    assert rows.features["user"].of(numbers)[0].tolist() == [user - 1 for user, *_ in kept]
    assert rows.features["movie"].of(numbers)[0].tolist() == [line[1] // 2 - 1 for line in kept]


def test_ml1m_as_arrays_is_the_same(tmp_path: Path) -> None:
    published = made_data.write_ml1m(tmp_path)
    expected = ml1m.read(published)
    lines = [line.split("::") for line in published.read_text().splitlines()]
    columns = [np.array(column, np.int16) for column in list(zip(*lines, strict=True))[:3]]
    arrays = dict(zip(("user", "movie", "rating"), columns, strict=True))
    np.savez(published.with_name("ratings.npz"), **arrays)
    assert_same_rows(ml1m.read(published.with_name("ratings.npz")), expected)


def raw_values(rows: Rows, name: str, numbers: torch.Tensor) -> list[int]:
    feature = rows.features[name]
    return feature.mapped(feature.raw_ids).of(numbers)[0].tolist()


def test_raw_ids_of_frappe_are_those_of_the_files(tmp_path: Path) -> None:
    path = made_data.write_frappe(tmp_path)
    splits = frappe.read(path)
    rows = np.loadtxt(path, np.int64, delimiter=",", skiprows=1)
    for column, field in enumerate(frappe.FIELDS, 1):
        assert raw_values(splits.rows, field, splits.train) == rows[:, column].tolist()


def test_raw_ids_of_ml1m_are_numbers_and_hashed_texts(tmp_path: Path) -> None:
    path = made_data.write_ml1m(tmp_path)
    rows = ml1m.read(path)
    lines = [list(map(int, line.split("::"))) for line in path.read_text().splitlines()]
    kept = [(user, movie) for user, movie, rating, _ in lines if rating != 3]
    everything = torch.arange(len(kept))
    assert raw_values(rows, "user", everything) == [user for user, _ in kept]
    assert raw_values(rows, "movie", everything) == [movie for _, movie in kept]
    texts = {
        "gender": ["FM"[user % 2] for user, _ in kept],
        "age": [("1", "18", "25")[user % 3] for user, _ in kept],
        "release_year": [str(1990 + movie % 5) for _, movie in kept],
        "genres": [name for _, movie in kept for name in made_data.GENRES[: 1 + movie % 4]],
    }
    for name, values in texts.items():
        assert raw_values(rows, name, everything) == text_ids(values).tolist()


def test_tables_get_rows_for_a_part_of_the_ids(tmp_path: Path) -> None:
    rows = ml1m.read(made_data.write_ml1m(tmp_path))
    whole = rows_in_tables(CtrConfig(), rows)
    assert whole.rows is rows
    assert whole.num_rows == {name: feature.num_ids for name, feature in rows.features.items()}
    numbers = torch.arange(50)
    hashed = rows_in_tables(CtrConfig(capacity=0.3), rows)
    dynamic = rows_in_tables(CtrConfig(capacity=0.3, dynamic=True), rows)
    assert dynamic.num_rows == hashed.num_rows
    for name, feature in rows.features.items():
        size = hashed.num_rows[name]
        assert size == max(1, round(0.3 * feature.num_ids))
        raw = raw_values(rows, name, numbers)
        assert dynamic.rows.features[name].of(numbers)[0].tolist() == raw
        assert hashed.rows.features[name].of(numbers)[0].tolist() == [id_ % size for id_ in raw]


def test_rows_of_a_given_capacity_are_divided(tmp_path: Path) -> None:
    rows = ml1m.read(made_data.write_ml1m(tmp_path))
    config = DCNv2Config(capacity=0.5, dynamic=True)
    sizes = rows_in_tables(config, rows).num_rows
    model = build_model(config, sizes, 0, torch.device("cpu"))
    for name, size in sizes.items():
        bag = model.embedding_bag_collection.embedding_bags[name]
        assert len(bag.weight) == size + 1  # so few that ids share all of them, beside one
    everything = rows_in_tables(CtrConfig(dynamic=True), rows).num_rows
    assert all(everything[name] > feature.num_ids for name, feature in rows.features.items())


@pytest.mark.parametrize("num_rows", [1, 2, 127, 128, 1000])
@pytest.mark.parametrize("shared", [0.0, 0.5, 0.999])
def test_tables_share_a_part_of_their_rows(num_rows: int, shared: float) -> None:
    """All of them, and one is left, where they are few."""
    size = table_size(num_rows, is_dynamic=True, evicts=True, eviction=Eviction.LFU, shared=shared)
    assert size.dynamic is not None
    assert size.num_embeddings >= 1
    is_small = bool(shared) and num_rows < 128
    assert size.num_embeddings + size.dynamic.num_hashed_rows == num_rows + is_small


def edit_line(path: Path, number: int, line: str) -> None:
    lines = path.read_bytes().decode("latin-1").splitlines(keepends=True)
    lines[number - 1] = line + "\n"
    path.write_bytes("".join(lines).encode("latin-1"))


GOOD_FRAPPE = "1,2,10,23,30,37,39,42,44,53,58"


@pytest.mark.parametrize(
    ("number", "line", "message"),
    [
        (1, "label,user", r"valid.csv, line 1: must be label,user,item,.*, got 'label,user'"),
        (5, GOOD_FRAPPE + ",1", r"valid.csv, line 5: must have 11 fields .* got 12: '1,2,10"),
        (5, "1,2", r"valid.csv, line 5: must have 11 fields \(label, user, .*, got 2: '1,2'"),
        (7, GOOD_FRAPPE.replace("23", "x"), r"valid.csv, line 7, daytime: must be an integer, got"),
        (7, GOOD_FRAPPE.replace("23", ""), r"valid.csv, line 7, daytime: must .*, got ''"),
        (9, "-" + GOOD_FRAPPE, r"valid.csv, line 9: label must be 0 or 1, got -1"),
    ],
)
def test_bad_lines_of_frappe_are_named(
    tmp_path: Path, number: int, line: str, message: str
) -> None:
    path = made_data.write_frappe(tmp_path)
    edit_line(path.with_name("valid.csv"), number, line)
    with pytest.raises(ValueError, match=re.escape(str(path.parent)) + "/" + message):
        frappe.read(path)


def test_missing_parts_of_frappe_are_named(tmp_path: Path) -> None:
    path = made_data.write_frappe(tmp_path)
    path.with_name("valid.csv").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"train.csv is read with valid.csv and test.csv beside it, and .* lacks valid.csv",
    ):
        find_data(frappe.FILES, tmp_path)


@pytest.mark.parametrize(
    ("name", "number", "line", "message"),
    [
        ("ratings", 5, "1::2::4", r"line 5: must have 4 fields \(UserID, .* between '::', got 3"),
        ("ratings", 5, "1::x::4::9", r"line 5, MovieID: must be an integer, got 'x'"),
        ("ratings", 5, "1::2::6::9", r"line 5: Rating must be 1 to 5, got 6"),
        ("ratings", 5, "1::3::4::9", r"line 5: must be of one in movies.dat, and 3 is not there"),
        ("ratings", 5, "99::2::4::9", r"line 5: must be of one in users.dat, and 99 is not there"),
        ("users", 3, "3::M::1::2", r"line 3: must have 5 columns \(UserID, Gender, Age, Occup"),
        ("users", 3, "x::M::1::2::9", r"line 3: UserID must be a number above .*, 2, got 'x'"),
        ("movies", 3, "4::Film (1990)::Drama", r"line 3: MovieID must be .*, 4, got '4'"),
        ("movies", 3, "6::Film (1990)", r"line 3: must have 3 columns \(MovieID, Title, Genres\)"),
        ("movies", 3, "6::Film::Drama", r"line 3: .* must end with its year .*, got 'Film'"),
    ],
)
def test_bad_lines_of_ml1m_are_named(
    tmp_path: Path, name: str, number: int, line: str, message: str
) -> None:
    path = made_data.write_ml1m(tmp_path)
    edit_line(path.with_name(f"{name}.dat"), number, line)
    with pytest.raises(ValueError, match=re.escape(str(path.parent)) + f"/{name}.dat, " + message):
        ml1m.read(path)


def test_empty_files_are_named(tmp_path: Path) -> None:
    path = made_data.write_ml1m(tmp_path)
    for name in ("users.dat", "ratings.dat"):
        path.with_name(name).write_text("")
        with pytest.raises(ValueError, match=rf"{name}: must hold .*, got none"):
            ml1m.read(path)


@pytest.mark.parametrize(("recipe", "files"), [("ctr-frappe", "train.csv"), ("ctr-ml1m", "rat")])
def test_help_says_which_files_are_read(
    recipe: str, files: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([recipe, "--help"])
    assert files in capsys.readouterr().out
