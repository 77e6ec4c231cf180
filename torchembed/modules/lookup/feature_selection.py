"""Selection of some features of a batch, as a batch of its own, and the numbers of their ids."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.host_numbers import HostNumbers
from torchembed.core.piece_order import Reorder, in_order
from torchembed.core.stand_ins import is_stand_in
from torchembed.ops.jagged import permute_features


def num_ids_of_features(features: SparseFeatures) -> HostNumbers:
    """The number of ids of each feature."""
    batch_size, num_features = features.batch_size, len(features.keys)
    if features.hotness is not None:
        hotness = torch.tensor(features.hotness, dtype=torch.int64, device="cpu")
        return HostNumbers(hotness * batch_size)
    if not batch_size:
        return HostNumbers(torch.zeros(num_features, dtype=torch.int64, device="cpu"))
    return HostNumbers(lengths_of_features(features))


def lengths_of_features(features: SparseFeatures) -> Tensor:
    """``[F]``: the number of ids of each feature of jagged ``features`` with samples, on their
    device."""
    return bounds_of_features(features).diff()


def bounds_of_features(features: SparseFeatures) -> Tensor:
    """``[F + 1]``: where the ids of each feature of jagged ``features`` begin, and end."""
    assert features.offsets is not None
    step = max(features.batch_size, 1)
    return features.offsets[::step][: len(features.keys) + 1]


def offsets_of_features(features: SparseFeatures) -> Tensor:
    """``[F, B + 1]``: where the bags of each of the jagged ``features`` begin and end among its own
    ids."""
    assert features.offsets is not None
    batch_size = features.batch_size
    if not batch_size:
        return features.offsets.new_zeros(len(features.keys), 1)
    offsets = features.offsets.unfold(0, batch_size + 1, batch_size)
    return offsets - offsets[:, :1]


def select_features(
    features: SparseFeatures,
    indices: Sequence[int],
    num_ids: int | None = None,
    reorder: Reorder = in_order,
) -> SparseFeatures:
    """The features at ``indices``, in that order, as a batch of its own.

    Returns ``features`` itself where that is the same. Never synchronizes on a GPU: where it is not
    told the ``num_ids`` of what it selects, jagged values then keep a capacity of ids that no bag
    holds at their end. ``reorder`` is for ids with fixed hotness that are often selected so.
    """
    indices = list(indices)
    if indices == list(range(len(features.keys))):
        return features
    # A feature that two tables share appears twice: the copy's key only has to be different.
    keys = tuple(f"{features.keys[i]}@{n}" for n, i in enumerate(indices))
    batch_size = features.batch_size
    if features.hotness is not None:
        counts = [count * batch_size for count in features.hotness]
        values, weights = reorder(features.values, counts, indices), features.weights
        weights = None if weights is None else reorder(weights, counts, indices)
        hotness = tuple(features.hotness[i] for i in indices)
        return SparseFeatures(
            keys=keys, values=values, batch_size=batch_size, hotness=hotness, weights=weights
        )
    assert features.offsets is not None
    if num_ids is None:
        num_ids = _num_ids_for(features, indices)
    permuted = permute_features(
        features.values,
        features.offsets,
        indices,
        num_features=len(features.keys),
        batch_size=batch_size,
        weights=features.weights,
        num_ids=num_ids,
    )
    return SparseFeatures(
        keys=keys,
        values=permuted.values,
        batch_size=batch_size,
        offsets=permuted.offsets,
        weights=permuted.weights,
    )


def capacity_for(features: SparseFeatures, indices: Sequence[int]) -> int:
    """The most ids that ``features`` can have at ``indices``, by their shape alone."""
    return features.values.numel() * max([0, *Counter(indices).values()])


def _num_ids_for(features: SparseFeatures, indices: Sequence[int]) -> int:
    """The number of ids of jagged ``features`` at ``indices``; on a GPU, the most that it can
    be."""
    batch_size = features.batch_size
    is_traced = torch.compiler.is_compiling() or is_stand_in(features.values)
    if features.values.is_cuda or is_traced:
        return capacity_for(features, indices)
    if not batch_size:
        return 0
    assert features.offsets is not None
    return int(features.offsets[::batch_size].diff()[indices].sum())
