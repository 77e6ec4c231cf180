"""Ranking each user's held-out item among all items."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from recipes.sequences.packed import HistoryWindows, PackedBatches, needed_capacity
from torchembed.core import ranks
from torchembed.models import Histories
from torchembed.training import RankingEvaluation, ranking_quality, target_ranks

KS = (10, 50, 200)
LONGEST_SEEN = 200
"""The newest items of a user, which are no candidates."""
Score = Callable[[Histories], Tensor]
"""From histories of B users to scores ``[B, num_items]``."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    make_score: Callable[[], Score],
    windows: HistoryWindows,
    *,
    device: torch.device,
    num_users: int = 256,
) -> RankingEvaluation:
    """Hit rates and NDCG of what followed each user's history, over the users of all ranks.

    Candidates are all items but the newest 200 of the user before it.

    Args:
        model: in evaluation mode meanwhile.
        make_score: called once, in that mode.
        windows: the histories that are scored, up to the held-out items.
        device: this rank's.
        num_users: users of a batch.
    """
    was_training = model.training
    model.eval()
    seen = HistoryWindows(windows.data, max_length=LONGEST_SEEN, num_left_out=0)
    score, found = make_score(), []
    for given, all_seen in zip(
        _batches(windows, num_users), _batches(seen, num_users), strict=True
    ):
        histories, before = (
            batch.mapped(lambda tensor: tensor.to(device)) for batch in (given, all_seen)
        )
        scores = score(histories).float()
        last = (histories.offsets[1:] - 1).clamp_min(0)
        targets = histories.next_items[last]
        of_targets = target_ranks(scores, targets, _items_of(before, scores.shape[1]))
        found.append(of_targets[histories.offsets.diff() > 0])
    model.train(was_training)
    return ranking_quality(torch.cat(found), KS)


def _batches(windows: HistoryWindows, num_users: int) -> PackedBatches:
    """This rank's part of all users."""
    users = torch.arange(windows.data.num_users)
    num_ranks = ranks.world_size()
    sizes = {"batch_size": num_users * num_ranks, "num_ranks": num_ranks}
    capacity = needed_capacity(windows, [users], **sizes)
    return PackedBatches(windows, users, capacity=capacity, rank=ranks.rank(), **sizes)


def _items_of(histories: Histories, num_items: int) -> Tensor:
    """bool ``[B, num_items]``: the items of each history."""
    num_users = len(histories.offsets) - 1
    positions = torch.arange(len(histories.items), device=histories.items.device)
    users = torch.searchsorted(histories.offsets[1:].contiguous(), positions, right=True)
    # Places behind the last history are of a user more.
    found = torch.zeros(num_users + 1, num_items, dtype=torch.bool, device=positions.device)
    found[users, histories.items] = True
    return found[:num_users]
