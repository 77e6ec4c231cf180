"""The loss of a softmax over the items that the users of a batch chose."""

import torch
from torch import Tensor


def in_batch_softmax(
    users: Tensor,
    items: Tensor,
    ids: Tensor,
    *,
    temperature: float,
    log_probabilities: Tensor | None = None,
) -> Tensor:
    """The negative logarithm of each user's item's softmax among the items of all users.

    Scores are products over the temperature, less the logarithm of the probability with which an
    item is in the batch where that is given: X. Yi et al., "Sampling-Bias-Corrected Neural Modeling
    for Large Corpus Item Recommendations", RecSys 2019. In float32. Items of others that are the
    user's own item are left out.

    Args:
        users: ``[B, D]``.
        items: ``[B, D]``: the vector of the item that each user chose.
        ids: int64 ``[B]``: its number.
        temperature: what products are divided by.
        log_probabilities: ``[B]``, of the items; None for no correction.

    Returns:
        ``[B]``.
    """
    with torch.autocast(users.device.type, enabled=False):
        scores = users.float() @ items.float().T / temperature
        if log_probabilities is not None:
            scores = scores - log_probabilities
        is_own = ids.unsqueeze(1) == ids
        is_other_place = ~torch.eye(len(ids), dtype=torch.bool, device=ids.device)
        scores = scores.masked_fill(is_own & is_other_place, -torch.inf)
        return scores.logsumexp(1) - scores.diagonal()
