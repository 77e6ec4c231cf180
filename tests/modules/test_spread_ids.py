"""Ids of jagged features are spread over a fixed number of places for each feature."""

import pytest
import torch

import torchembed
from torchembed.modules.lookup.spread_ids import IdSpreader


def features(lists: list[list[list[int]]], spare: int = 0) -> torchembed.SparseFeatures:
    """Jagged features with ``spare`` ids behind the last bag."""
    keys = [f"f{number}" for number in range(len(lists))]
    made = torchembed.SparseFeatures.from_lists(keys, lists)
    values = torch.cat([made.values, torch.full((spare,), 99)])
    return torchembed.SparseFeatures(
        keys=made.keys, values=values, batch_size=made.batch_size, offsets=made.offsets
    )


@pytest.mark.parametrize("spare", [0, 5])
def test_each_feature_has_its_ids_first_in_its_places(spare: int, device: torch.device) -> None:
    batch = features([[[7], [], [8, 9]], [[], [], []], [[1, 2], [3], []]], spare).to(device)
    found = IdSpreader()(batch, (5, 2, 3))
    assert found.features.values.tolist() == [7, 8, 9, 0, 0, 0, 0, 1, 2, 3]
    assert found.features.hotness == (5, 2, 3)
    assert found.features.batch_size == 1
    assert found.is_id.tolist() == [True] * 3 + [False] * 4 + [True] * 3
    assert found.offsets.tolist() == [[0, 1, 1, 3], [0, 0, 0, 0], [0, 2, 3, 3]]


def test_ids_that_have_no_place_are_left_out(device: torch.device) -> None:
    batch = features([[[7, 8, 9], [6]], [[1], [2]]]).to(device)
    found = IdSpreader()(batch, (2, 3))
    assert found.features.values.tolist() == [7, 8, 1, 2, 0]
    assert found.offsets.tolist() == [[0, 2, 2], [0, 1, 2]]


def test_there_may_be_no_ids_and_no_places(device: torch.device) -> None:
    batch = features([[[], []], [[], []]]).to(device)
    found = IdSpreader()(batch, (0, 2))
    assert found.features.values.tolist() == [0, 0]
    assert found.is_id.tolist() == [False, False]
    assert found.offsets.tolist() == [[0, 0, 0], [0, 0, 0]]
