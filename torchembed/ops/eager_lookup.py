"""Lookups by PyTorch's own operations, for float64 and maxima, which kernels do not take, and for
transforms of ``torch.func``, which see through PyTorch's operations only."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.types import Pooling


def eager_sequence_lookup(weight: Tensor, rows: Tensor, *, sparse: bool) -> Tensor:
    """``out[p] = weight[rows[p]]``, ``[L, D]`` in the dtype of ``weight``.

    A row of -1 gives zeros, and its gradient is zeros for another row of ``rows``.

    Args:
        weight: ``[R, D]``, floating.
        rows: ``[L]``, int32 or int64, each -1 or in ``[0, R)``; not checked.
        sparse: whether the gradient of ``weight`` is a ``torch.sparse_coo`` tensor.
    """
    if weight.shape[0] == 0:
        # Zeros that require a gradient where the weight does.
        return weight.sum(0).expand(rows.numel(), -1)
    if rows.numel() == 0:
        return torch.nn.functional.embedding(rows, weight, sparse=sparse)
    is_none = rows < 0
    some = torch.where(is_none, rows.amax(), rows).clamp_min(0)
    vectors = torch.nn.functional.embedding(some, weight, sparse=sparse)
    return vectors.masked_fill(is_none.unsqueeze(1), 0.0)


def bags_of_positions(
    num_ids: int,
    offsets: Tensor | None,
    hotness: Sequence[int] | None,
    batch_size: int,
    device: torch.device,
) -> Tensor:
    """The bag of each position, int64 ``[L]``, feature-major: bag ``(f, b)`` is ``f * B + b``.
    Positions in no bag get the number of bags."""
    if offsets is not None:
        positions = torch.arange(num_ids, dtype=offsets.dtype, device=device)
        return torch.searchsorted(offsets, positions, right=True) - 1
    assert hotness is not None
    bags = [
        torch.arange(f * batch_size, (f + 1) * batch_size, device=device).repeat_interleave(
            count, output_size=count * batch_size
        )
        for f, count in enumerate(hotness)
    ]
    return torch.cat(bags) if bags else torch.zeros(0, dtype=torch.int64, device=device)


def pool_vectors(vectors: Tensor, bags: Tensor, num_bags: int, pooling: Pooling) -> Tensor:
    """The sum, or mean, of the vectors of each bag, ``[num_bags, D]``; zeros for an empty one.

    On a GPU the order of a sum is not fixed, unless ``torch.use_deterministic_algorithms`` is on.

    Args:
        vectors: ``[L, D]``; sums are in their dtype.
        bags: bag of each vector, int64 ``[L]``; ``num_bags`` stands for none.
    """
    sums = vectors.new_zeros(num_bags + 1, vectors.shape[1]).index_add(0, bags, vectors)
    if pooling is Pooling.MEAN:
        ones = torch.ones_like(bags)
        counts = torch.zeros(num_bags + 1, dtype=torch.int64, device=bags.device)
        sums = sums / counts.index_add(0, bags, ones).clamp_min(1).unsqueeze(1)
    return sums[:-1]


def max_of_bags(vectors: Tensor, is_counted: Tensor, bags: Tensor, num_bags: int) -> Tensor:
    """The largest element of each column among the vectors of each bag, ``[num_bags, D]``.

    A bag in which no vector counts gives zeros. The gradient goes to the first vector that has the
    largest element, as ``torch.nn.EmbeddingBag``'s. Deterministic, never synchronizes.

    Args:
        vectors: ``[L, D]``.
        is_counted: bool ``[L]``; False for vectors that are left out.
        bags: as for :func:`pool_vectors`.
    """
    num_ids, dim = vectors.shape
    if num_ids == 0:
        return vectors.sum(0).expand(num_bags, dim)
    bags = torch.where(is_counted, bags, num_bags).unsqueeze(1).expand(num_ids, dim)
    shape, values = (num_bags + 1, dim), vectors.detach()
    largest = values.new_full(shape, -torch.inf).scatter_reduce(0, bags, values, "amax")
    positions = torch.arange(num_ids, device=bags.device).unsqueeze(1).expand(num_ids, dim)
    # scatter_reduce would share a gradient among equal maxima; the first of them is found by
    # position, and the gather below gives it all.
    of_bag = largest.gather(0, bags)
    is_largest = (values == of_bag) | (values.isnan() & of_bag.isnan())
    positions = torch.where(is_largest, positions, num_ids)
    first = torch.full(shape, num_ids, device=bags.device)
    first = first.scatter_reduce(0, bags, positions, "amin")[:-1]
    found = vectors.gather(0, first.clamp_max(num_ids - 1))
    return found.masked_fill(first == num_ids, 0.0)
