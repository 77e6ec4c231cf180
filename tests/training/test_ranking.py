"""Ranks, hit rates and NDCG, in small cases that are exact."""

import math

import pytest
import torch

from torchembed.training import ranking_quality, target_ranks


def test_ranks_are_counted_among_candidates(device: torch.device) -> None:
    scores = torch.tensor(
        [[0.1, 0.5, 0.3, 0.4], [0.9, 0.1, 0.2, 0.3], [0.2, 0.2, 0.2, 0.1]], device=device
    )
    targets = torch.tensor([2, 0, 1], device=device)
    assert target_ranks(scores, targets).tolist() == [3, 1, 3]  # equal scores rank before it
    seen = torch.zeros(3, 4, dtype=torch.bool, device=device)
    seen[0, 1] = seen[0, 2] = seen[2, 0] = True
    assert target_ranks(scores, targets, seen).tolist() == [2, 1, 2]


def test_scores_that_are_nan_find_nothing(device: torch.device) -> None:
    scores = torch.full((1, 5), math.nan, device=device)
    targets = torch.tensor([0], device=device)
    assert target_ranks(scores, targets).tolist() == [5]
    scores[0, 0] = 1.0
    assert target_ranks(scores, targets).tolist() == [5]


def test_hit_rates_and_gains() -> None:
    found = ranking_quality(torch.tensor([1, 3, 11, 7]), [1, 3, 10])
    assert found.hit_rate == {1: 0.25, 3: 0.5, 10: 0.75}
    # 1 / log2(2) = 1, 1 / log2(4) = 1 / 2, 1 / log2(8) = 1 / 3.
    assert found.ndcg[1] == 0.25
    assert found.ndcg[3] == 0.375
    assert found.ndcg[10] == (1 + 0.5 + 1 / 3) / 4
    assert found.num_users == 4
    assert list(found.scalars()) == ["hr@1", "hr@3", "hr@10", "ndcg@1", "ndcg@3", "ndcg@10"]


def test_what_cannot_be_ranked_is_named() -> None:
    with pytest.raises(ValueError, match=r"ks must be .* at least 1, got \[10, 0\]"):
        ranking_quality(torch.tensor([1]), [10, 0])
    with pytest.raises(ValueError, match="at least one user to rank items for, got none"):
        ranking_quality(torch.empty(0, dtype=torch.int64), [10])
