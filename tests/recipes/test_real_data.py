"""The real data sets are what the protocols say they are, where they are there."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from recipes.ctr import frappe, ml1m
from recipes.ctr.rows import BagEach
from recipes.data_folder import find_data
from recipes.dlrm_dcnv2 import run
from recipes.dlrm_dcnv2.config import criteo_kaggle
from recipes.sequences import interactions
from torchembed.data import Split


def find_or_skip(files: Mapping[str, Sequence[str]]) -> Path:
    try:
        return find_data(files, None)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_frappe() -> None:
    splits = frappe.read(find_or_skip(frappe.FILES))
    assert [len(part) for part in splits[1:]] == [202_027, 57_722, 28_860]
    assert sum(feature.num_ids for feature in splits.rows.features.values()) == 5382


def test_ml1m() -> None:
    rows = ml1m.read(find_or_skip(ml1m.FILES))
    assert len(rows.labels) == 739_012
    assert round(float(rows.labels.mean()), 4) == 0.7784
    sizes = {name: feature.num_ids for name, feature in rows.features.items()}
    assert sizes == {
        "user": 6040,
        "age": 7,
        "gender": 2,
        "occupation": 21,
        "movie": 3883,
        "genres": 18,
        "release_year": 81,
    }
    genres = rows.features["genres"]
    assert isinstance(genres, BagEach)
    assert sorted(set(genres.offsets.diff().tolist())) == [1, 2, 3, 4, 5, 6]


def test_sequences_of_ml1m() -> None:
    data = interactions.read(find_or_skip(interactions.FILES))
    assert (len(data.items), data.num_users, data.num_items) == (1_000_209, 6040, 3883)
    assert int(data.offsets.diff().min()) == 20


def test_criteo_kaggle() -> None:
    path = find_or_skip({"criteo_kaggle_first10k/train.txt.gz": ()})
    config = criteo_kaggle(path.parent)
    num_rows = {
        split: sum(len(batch.labels) for batch in run.open_split(config, split))
        for split in (Split.TRAIN, Split.VALIDATION, Split.TEST)
    }
    assert num_rows == {Split.TRAIN: 9000, Split.VALIDATION: 500, Split.TEST: 500}
