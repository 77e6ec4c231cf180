"""The area under the ROC curve."""

import math

import numpy as np
from numpy.typing import NDArray


def rank_auc(labels: NDArray[np.floating], scores: NDArray[np.floating]) -> float:
    """Area under the ROC curve, ties counted half: Mann-Whitney's statistic, in float64.

    It depends on the order of the scores alone, so they may be logits of any size.

    Args:
        labels: ``[N]``, 0 or 1.
        scores: ``[N]``, finite.

    Returns:
        The area; NaN where all labels are equal.
    """
    num_clicks = int(np.count_nonzero(labels))
    num_others = len(labels) - num_clicks
    if not num_clicks or not num_others:
        return math.nan
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(counts)
    mean_rank = last_rank - (counts - 1) / 2
    rank_sum = float(mean_rank[which[labels == 1]].sum())
    return (rank_sum - num_clicks * (num_clicks + 1) / 2) / (num_clicks * num_others)
