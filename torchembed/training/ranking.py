"""Quality of rankings of all items: hit rates and normalized discounted cumulative gains."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core import ranks


class RankingEvaluation(NamedTuple):
    """Measures of how high each user's held-out item ranks among the candidates."""

    hit_rate: dict[int, float]
    """For each k, the part of the users whose item is among the first k."""
    ndcg: dict[int, float]
    """For each k, the mean of ``1 / log2(rank + 1)``, 0 beyond rank k: the normalized discounted
    cumulative gain of one relevant item (K. Järvelin and J. Kekäläinen, TOIS 2002)."""
    num_users: int

    def scalars(self) -> dict[str, float]:
        """Each figure by a name such as ``hr@10``, for a
        :class:`~torchembed.training.MetricsWriter`."""
        named = (("hr", self.hit_rate), ("ndcg", self.ndcg))
        return {f"{name}@{k}": value for name, found in named for k, value in found.items()}


def target_ranks(scores: Tensor, targets: Tensor, excluded: Tensor | None = None) -> Tensor:
    """The rank of each user's target among the candidates, from 1.

    Candidates with an equal score rank before the target, and so do scores that are NaN: a model
    that scores all items alike has found nothing.

    Args:
        scores: ``[B, N]`` of N items.
        targets: int64 ``[B]``.
        excluded: bool ``[B, N]``, items that are no candidates, such as those that the user has
            seen; the target is one in any case. None for none.

    Returns:
        int64 ``[B]``.
    """
    of_targets = scores.gather(1, targets.unsqueeze(1))
    is_before = ~(scores < of_targets)
    if excluded is not None:
        is_before &= ~excluded
    is_before.scatter_(1, targets.unsqueeze(1), True)  # it counts itself
    return is_before.sum(1)


def ranking_quality(ranks_of_targets: Tensor, ks: Sequence[int]) -> RankingEvaluation:
    """Hit rates and NDCG of the targets of all ranks' users; collective.

    Args:
        ranks_of_targets: this rank's :func:`target_ranks`, int64 ``[B]``, on any device.
        ks: numbers of first items, each at least 1.

    Raises:
        ValueError: if a k is below 1, or there is no user on any rank.
    """
    if not ks or min(ks) < 1:
        raise ValueError(f"ks must be at least one number, each at least 1, got {list(ks)}")
    found = ranks_of_targets.double()
    gains = 1 / (found + 1).log2()
    sums = [(found <= k).sum(dtype=torch.float64) for k in ks]
    sums += [gains.where(found <= k, 0.0).sum() for k in ks]
    count = torch.tensor(float(len(found)), dtype=torch.float64)
    total = ranks.sum_over_ranks(torch.stack([*(s.cpu() for s in sums), count])).tolist()
    num_users = int(total.pop())
    if not num_users:
        raise ValueError("there must be at least one user to rank items for, got none on any rank")
    means = [value / num_users for value in total]
    hit_rate = dict(zip(ks, means[: len(ks)], strict=True))
    return RankingEvaluation(hit_rate, dict(zip(ks, means[len(ks) :], strict=True)), num_users)
