"""A ``DataLoader`` over samples with sparse features."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torchembed import SparseFeatures
from torchembed.data import Batch, collate

GENRES = [[3, 9], [], [9], [1]]


class Clicks(Dataset[Batch]):
    """Four samples, each a batch's parts without its dimension."""

    def __len__(self) -> int:
        return len(GENRES)

    def __getitem__(self, index: int) -> Batch:
        ids = SparseFeatures.from_dict({"user": [index], "genre": [GENRES[index]]})
        return Batch(torch.full((2,), float(index)), ids, torch.tensor(float(index % 2)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_become_batches(num_workers: int) -> None:
    loader: Any = DataLoader(Clicks(), batch_size=3, collate_fn=collate, num_workers=num_workers)
    first, last = loader
    assert isinstance(first, Batch)
    assert first.dense.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert first.labels.tolist() == [0, 1, 0]
    assert first.sparse.keys == ("user", "genre")
    assert first.sparse.values.tolist() == [0, 1, 2, 3, 9, 9]
    assert first.sparse.offsets.tolist() == [0, 1, 2, 3, 5, 5, 6]
    assert last.sparse.batch_size == 1 and last.sparse.values.tolist() == [3, 1]


def test_what_else_there_is_stays_torchs() -> None:
    ids = SparseFeatures.from_dict({"user": [1]})
    found = collate([{"ids": ids, "name": "a", "n": 1}, {"ids": ids, "name": "b", "n": 2}])
    assert found["name"] == ["a", "b"] and found["n"].tolist() == [1, 2]
    assert found["ids"].values.tolist() == [1, 1]
    with pytest.raises(TypeError, match="must contain tensors"):
        collate([object()])


def test_no_dense_features_stay_none() -> None:
    ids = SparseFeatures.from_dict({"item": [[7]]})
    found = collate([Batch(None, ids, torch.ones(())), Batch(None, ids, torch.zeros(()))])
    assert found.dense is None
    assert found.sparse.values.tolist() == [7, 7]
    with pytest.raises(TypeError, match="samples must all have None in one place, or none of them"):
        collate([(None, 1), (torch.ones(2), 1)])


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="samples must hold at least one sample, got none"):
        collate([])
