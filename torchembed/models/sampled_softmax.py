"""The loss of a softmax over the item that followed and items that were drawn."""

import torch
import torch.nn.functional as F
from torch import Tensor


def sampled_softmax(
    queries: Tensor,
    positives: Tensor,
    negatives: Tensor,
    is_positive: Tensor,
    *,
    temperature: float,
) -> Tensor:
    """The negative logarithm of the positive's softmax among itself and its negatives.

    Logits are cosines over the temperature: ``-log(exp(cos(q, p) / t) / (exp(cos(q, p) / t) +
    sum over n of exp(cos(q, n) / t)))``, in float32. A. Klenitskiy and A. Vasilev, "Turning Dross
    Into Gold Loss: is BERT4Rec really better than SASRec?", RecSys 2023.

    Args:
        queries: ``[L, D]``.
        positives: ``[L, D]``.
        negatives: ``[L, N, D]``.
        is_positive: bool ``[L, N]``: negatives that are the positive itself, and are left out.
        temperature: what cosines are divided by.

    Returns:
        ``[L]``.
    """
    with torch.autocast(queries.device.type, enabled=False):
        queries = F.normalize(queries.float(), dim=1)
        positive = (queries * F.normalize(positives.float(), dim=1)).sum(1, keepdim=True)
        negatives = negatives.float()
        # Products are divided by lengths, so that no normalized copy of the negatives is made.
        lengths = torch.linalg.vector_norm(negatives, dim=2).clamp_min(_LEAST_LENGTH)
        products = (negatives @ queries.unsqueeze(2)).squeeze(2)
        negative = (products / lengths).masked_fill(is_positive, -torch.inf)
        logits = torch.cat([positive, negative], dim=1) / temperature
        return logits.logsumexp(1) - logits[:, 0]


_LEAST_LENGTH = 1e-12
"""``eps`` of ``torch.nn.functional.normalize``."""
