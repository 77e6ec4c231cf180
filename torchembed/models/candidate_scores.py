"""``CandidateScores``: what encoders of users and items say of candidates, for serving."""

from torch import Tensor, nn

from torchembed.models.impressions import Impressions
from torchembed.models.next_item import NextItem
from torchembed.models.two_tower import TwoTower


class CandidateScores(nn.Module):
    """A trained model of users and items, asked for the scores of candidates instead of its loss.

    Deploy and export this, since ``forward`` of the model itself computes what training needs. The
    vectors of users are those to search an index of items with.

    Args:
        model: of users and items. An ``HSTU`` in it goes by distances alone, since impressions
            have no times.
    """

    def __init__(self, model: TwoTower | NextItem) -> None:
        super().__init__()
        self.model = model

    def forward(self, impressions: Impressions) -> dict[str, Tensor]:
        """``scores [B, C]``, the cosine of each candidate's vector and its user's, and
        ``user [B, D]``, the users' unit vectors. A user without a history has a vector of zeros by
        ``NextItem``."""
        model = self.model
        if isinstance(model, NextItem):
            user = model.user_vectors(impressions.histories())
        else:
            user = model.user_vectors(impressions)
        items = model.item_vectors(impressions.candidates)
        return {"scores": (items @ user.unsqueeze(2)).squeeze(2), "user": user}
