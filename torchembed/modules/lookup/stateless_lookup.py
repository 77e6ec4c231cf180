"""The results of lookups that change nothing: vectors, and which ids had no row."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.ops.linearize_ids.reference import id_features

T = TypeVar("T")


class BadIds(NamedTuple):
    """The ids of a batch that are outside their table, on the batch's device."""

    keys: tuple[str, ...]
    """The names of the batch's ``F`` features."""
    is_bad: Tensor
    """bool ``[L]``, for each id of the batch in its order; of a feature that several tables use:
    True where the id is outside one of them."""
    num_bad: Tensor
    """int64 ``[F]``: bad ids of each feature."""


class Lookup(NamedTuple, Generic[T]):
    """The result of ``lookup``."""

    vectors: T
    """The vectors of ``forward``, without gradients."""
    bad_ids: BadIds


def find_bad_ids(features: SparseFeatures, num_ids: Sequence[int | None]) -> BadIds:
    """The bad ids of ``features``.

    Args:
        num_ids: for each feature the number of ids, from 0 on, that have a row; None where no id
            is bad.
    """
    values, device = features.values, features.values.device
    numbers = id_features(
        features.offsets,
        list(features.hotness or ()),
        features.batch_size,
        values.numel(),
        device,
    )
    # One more feature takes the positions behind the last bag.
    limits = [-1 if number is None else number for number in (*num_ids, None)]
    limit = torch.tensor(limits, dtype=torch.int64, device=device)[numbers]
    is_bad = (limit >= 0) & ((values < 0) | (values >= limit))
    num_bad = torch.zeros(len(limits), dtype=torch.int64, device=device)
    num_bad.index_add_(0, numbers, is_bad.long())
    return BadIds(features.keys, is_bad, num_bad[:-1])
