"""Ranking each user's held-out item among all items."""

import torch

from recipes.precision import Precision
from recipes.sequences.packed import HistoryWindows, PackedBatches, needed_capacity
from torchembed.core import ranks
from torchembed.models import Histories, NextItem
from torchembed.training import RankingEvaluation, ranking_quality, target_ranks

KS = (10, 50, 200)
_USERS = 256
"""Users of a batch."""


@torch.no_grad()
def evaluate(
    model: NextItem, windows: HistoryWindows, *, precision: Precision, device: torch.device
) -> RankingEvaluation:
    """Hit rates and NDCG of what followed each user's history, over the users of all ranks.

    Candidates are all items but those of the history. The model is in evaluation mode meanwhile.
    """
    was_training = model.training
    model.eval()
    users = torch.arange(windows.data.num_users)
    num_ranks, batch_size = ranks.world_size(), _USERS * ranks.world_size()
    capacity = needed_capacity(
        windows, users.unsqueeze(0), batch_size=batch_size, num_ranks=num_ranks
    )
    batches = PackedBatches(
        windows,
        users,
        batch_size=batch_size,
        capacity=capacity,
        rank=ranks.rank(),
        num_ranks=num_ranks,
    )
    found = []
    items = model.item_vectors()
    for batch in batches:
        histories = batch.mapped(lambda tensor: tensor.to(device))
        with precision.context(device):
            vectors = model.user_vectors(histories)
        has_history = histories.offsets.diff() > 0
        last = (histories.offsets[1:] - 1).clamp_min(0)
        of_targets = target_ranks(
            vectors @ items.T, histories.next_items[last], _seen(histories, len(items))
        )
        found.append(of_targets[has_history])
    model.train(was_training)
    return ranking_quality(torch.cat(found), KS)


def _seen(histories: Histories, num_items: int) -> torch.Tensor:
    """bool ``[B, num_items]``: the items of each history."""
    num_users = len(histories.offsets) - 1
    positions = torch.arange(len(histories.items), device=histories.items.device)
    users = torch.searchsorted(histories.offsets[1:].contiguous(), positions, right=True)
    # Places behind the last history are of a user more.
    seen = torch.zeros(num_users + 1, num_items, dtype=torch.bool, device=positions.device)
    seen[users, histories.items] = True
    return seen[:num_users]
