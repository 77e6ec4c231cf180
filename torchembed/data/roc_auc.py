"""The area under the ROC curve."""

import math

import numpy as np
from numpy.typing import NDArray


def roc_auc(labels: NDArray[np.floating], scores: NDArray[np.floating]) -> float:
    """Area under the ROC curve, ties counted half, in float64.

    It depends on the order of the scores alone, so they may be logits of any size. Needs
    scikit-learn (``pip install 'torchembed[recipes]'``).

    Args:
        labels: ``[N]``, 0 or 1.
        scores: ``[N]``, finite.

    Returns:
        The area; NaN where all labels are equal.
    """
    from sklearn.metrics import roc_auc_score

    if not 0 < np.count_nonzero(labels) < len(labels):
        return math.nan
    return float(roc_auc_score(labels, scores))
