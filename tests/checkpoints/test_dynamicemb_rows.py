"""Dumps of NVIDIA's dynamicemb, written here as it writes them: raw files of each rank."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.support.row_chunks import SPECIAL_KEYS, rows_by_key
from torchembed.checkpoints import open_dynamicemb_counts, open_dynamicemb_rows

DIM = 2
RANKS = (SPECIAL_KEYS, (), (10, 11, 12))
"""Keys of each rank; one has none."""
NUM_KEYS = 8


class Numbers(NamedTuple):
    """What the files hold of keys, in their order."""

    values: np.ndarray
    scores: np.ndarray
    states: np.ndarray


def numbers_of(keys: Sequence[int], state_width: int, num_scores: int) -> Numbers:
    def block(width: int, scale: float) -> np.ndarray:
        rows = [[scale * (key % 97) + column for column in range(width)] for key in keys]
        return np.array(rows).reshape(len(keys), width)

    return Numbers(block(DIM, 2), block(num_scores, 10), block(state_width, 3))


def dump(
    folder: Path,
    *,
    table: str = "user",
    ranks: Sequence[Sequence[int]] = RANKS,
    opt_type: str = "sgd",
    state_width: int = 0,
    eviction: str = "EvictStrategy.KLfu",
    num_scores: int = 1,
) -> Path:
    folder.mkdir(exist_ok=True)
    arguments = {"opt_type": opt_type, "lr": 0.1, "evict_strategy": eviction}
    folder.joinpath(f"{table}_opt_args.json").write_text(json.dumps(arguments))
    for rank, keys in enumerate(ranks):
        numbers = numbers_of(keys, state_width, num_scores)
        for item, array in (
            ("emb_keys", np.array(keys, "<i8")),
            ("emb_values", numbers.values.astype("<f4")),
            ("emb_scores", numbers.scores.astype("<i8")),
            ("emb_opt_values", numbers.states.astype("<f4")),
            ("counter_keys", np.array(keys, "<i8") ^ 1),
            ("counter_frequencies", np.arange(len(keys)).astype("<i8") + 1),
        ):
            name = f"{table}_{item}.rank_{rank}.world_size_{len(ranks)}"
            folder.joinpath(name).write_bytes(array.tobytes())
    return folder


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_rank_is_read_whatever_their_number(tmp_path: Path, num_ranks: int) -> None:
    ranks = RANKS[:num_ranks]
    folder = dump(tmp_path / "dump", ranks=ranks)
    dump(folder, table="user_emb", ranks=[[1], [2]])  # a name that begins like the other one
    source = open_dynamicemb_rows(folder, "user", embedding_dim=DIM, chunk_bytes=50)
    keys = [key for of_rank in ranks for key in of_rank]
    assert (source.num_rows, source.embedding_dim) == (len(keys), DIM)
    rows = rows_by_key(source)
    assert list(rows) == keys
    for key, row in rows.items():
        numbers = numbers_of([key], 0, 1)
        assert (row.values, row.score) == (numbers.values[0].tolist(), int(numbers.scores[0, 0]))
        assert (row.states, row.touched) == ({}, None)
    assert list(rows_by_key(open_dynamicemb_rows(folder, "user_emb", embedding_dim=DIM))) == [1, 2]


def test_a_table_without_rows(tmp_path: Path) -> None:
    folder = dump(tmp_path / "dump", ranks=[(), ()], opt_type="adam", state_width=2 * DIM)
    source = open_dynamicemb_rows(folder, "user", embedding_dim=DIM)
    assert source.num_rows == 0
    assert [chunk.states["exp_avg"].shape for chunk in source] == [(0, DIM)] * 2


@pytest.mark.parametrize(
    ("opt_type", "width", "names"),
    [
        ("adam", 2 * DIM, ["exp_avg", "exp_avg_sq"]),
        ("exact_adagrad", DIM, ["sum"]),
        ("exact_row_wise_adagrad", 1, ["sum"]),
    ],
)
def test_states_come_by_their_names_here(
    tmp_path: Path, opt_type: str, width: int, names: list[str]
) -> None:
    folder = dump(tmp_path / "dump", opt_type=opt_type, state_width=width)
    for key, row in rows_by_key(open_dynamicemb_rows(folder, "user", embedding_dim=DIM)).items():
        assert list(row.states) == names
        in_order = [x for name in names for x in np.ravel(row.states[name])]
        assert in_order == numbers_of([key], width, 1).states[0].tolist()
        assert all(isinstance(s, float) for s in row.states.values()) == (width == 1)


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_ages_become_times_of_the_last_use(tmp_path: Path, chunk_bytes: int) -> None:
    folder = dump(tmp_path / "dump", eviction="EvictStrategy.KLru")
    source = open_dynamicemb_rows(folder, "user", embedding_dim=DIM, chunk_bytes=chunk_bytes)
    rows = rows_by_key(source)
    ages = {key: int(numbers_of([key], 0, 1).scores[0, 0]) for key in rows}
    assert {key: row.score for key, row in rows.items()} == {
        key: max(ages.values()) - age + 1 for key, age in ages.items()
    }
    path = folder / "user_emb_scores.rank_2.world_size_3"
    path.write_bytes(np.array([3, -1, 2], "<i8").tobytes())
    with pytest.raises(ValueError, match=r"scores.rank_2.* must hold ages, .* got -1"):
        open_dynamicemb_rows(folder, "user", embedding_dim=DIM)
    empty = dump(tmp_path / "empty", ranks=[()], eviction="EvictStrategy.KLru")
    assert open_dynamicemb_rows(empty, "user", embedding_dim=DIM).num_rows == 0


def test_one_of_several_scores_is_chosen(tmp_path: Path) -> None:
    folder = dump(tmp_path / "dump", num_scores=2)
    source = open_dynamicemb_rows(folder, "user", embedding_dim=DIM, score_column=1)
    for key, row in rows_by_key(source).items():
        assert row.score == int(numbers_of([key], 0, 2).scores[0, 1])
    for column in (None, 2, -1):
        with pytest.raises(ValueError, match=rf"score_column must be in \[0, 2\).* got {column}"):
            open_dynamicemb_rows(folder, "user", embedding_dim=DIM, score_column=column)


def test_scores_and_states_may_be_missing_as_a_whole(tmp_path: Path) -> None:
    folder = dump(tmp_path / "dump")
    for path in (*folder.glob("*_scores.*"), *folder.glob("*_opt_values.*")):
        path.unlink()
    folder.joinpath("user_opt_args.json").unlink()
    rows = rows_by_key(open_dynamicemb_rows(folder, "user", embedding_dim=DIM))
    assert len(rows) == NUM_KEYS and all(row.score is None for row in rows.values())
    with pytest.raises(ValueError, match="score_column must be None for table user"):
        open_dynamicemb_rows(folder, "user", embedding_dim=DIM, score_column=0)


def test_counts_of_keys_without_rows(tmp_path: Path) -> None:
    folder = dump(tmp_path / "dump")
    found = {}
    for chunk in open_dynamicemb_counts(folder, "user", chunk_bytes=32):
        assert len(chunk.keys) <= 2
        found |= dict(zip(chunk.keys.tolist(), chunk.counts.tolist(), strict=True))
    assert found == {key ^ 1: n + 1 for keys in RANKS for n, key in enumerate(keys)}
    folder.joinpath("user_counter_frequencies.rank_2.world_size_3").write_bytes(bytes(8))
    with pytest.raises(ValueError, match=r"counts for 3 keys, as many as .* got 1"):
        open_dynamicemb_counts(folder, "user")
    for path in folder.glob("*_counter_frequencies.rank_2.*"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks user_counter_frequencies.rank_2"):
        open_dynamicemb_counts(folder, "user")


@pytest.mark.parametrize("item", ["emb_keys", "emb_values", "emb_scores", "emb_opt_values"])
@pytest.mark.parametrize("rank", range(3))
def test_every_missing_file_is_named(tmp_path: Path, item: str, rank: int) -> None:
    folder = dump(tmp_path / "dump", opt_type="exact_adagrad", state_width=DIM)
    name = f"user_{item}.rank_{rank}.world_size_3"
    folder.joinpath(name).unlink()
    with pytest.raises(FileNotFoundError, match=f"each of 3 ranks, and lacks {name}"):
        open_dynamicemb_rows(folder, "user", embedding_dim=DIM)


@pytest.mark.parametrize("item", ["emb_keys", "emb_values", "emb_scores", "emb_opt_values"])
@pytest.mark.parametrize("num_bytes", [-1, -8, 8])
@pytest.mark.parametrize("eviction", ["KLfu", "KLru"])
def test_every_size_that_does_not_fit_is_named(
    tmp_path: Path, item: str, num_bytes: int, eviction: str
) -> None:
    folder = dump(tmp_path / "dump", opt_type="exact_adagrad", state_width=DIM, eviction=eviction)
    path = folder / f"user_{item}.rank_2.world_size_3"
    content = path.read_bytes()
    path.write_bytes(content[:num_bytes] if num_bytes < 0 else content + bytes(num_bytes))
    with pytest.raises(ValueError, match=r"user_emb_\w+.rank_2.world_size_3 must (have|hold)"):
        open_dynamicemb_rows(folder, "user", embedding_dim=DIM)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    def refused(folder: Path, message: str, embedding_dim: int = DIM) -> None:
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            open_dynamicemb_rows(folder, "user", embedding_dim=embedding_dim)

    refused(dump(tmp_path / "of item", table="item"), r"and holds those of \['item'\]")
    refused(tmp_path / "nowhere", r"and holds those of \[\]")
    folder = dump(tmp_path / "two", ranks=[[1], [2]])
    refused(folder, "embedding_dim must be at least 1, got 0", 0)
    dump(folder)
    refused(folder, r"has files of \[2, 3\] ranks; remove those of the older one")
    refused(dump(tmp_path / "twice", ranks=[[1, 2], [2]]), "holds 2 in .*rank_0.* and in .*rank_1")
    refused(dump(tmp_path / "lamb", opt_type="lamb"), "opt_type of .* got 'lamb'")
    refused(dump(tmp_path / "sgd", state_width=1), "must be empty, since sgd has no states")
    wide = dump(tmp_path / "wide", opt_type="exact_row_wise_adagrad", state_width=4)
    refused(wide, "emb_opt_values.rank_0.* must hold states for 5 keys, as many as .* got 20")
    folder = dump(tmp_path / "without")
    folder.joinpath("user_opt_args.json").write_text("[1]")
    refused(folder, "must hold one object, got list")
    folder.joinpath("user_opt_args.json").write_text("{")
    refused(folder, "must be JSON, and is not")
    folder.joinpath("user_opt_args.json").unlink()
    refused(folder, "must hold user_opt_args.json, which says what scores and states are")
