"""Lookups of whole tables in operations that every exporter knows.

Bags between lengths are summed by scattering, without a loop over bags. An id that the table has no
row for, a negative length, and lengths that do not add up to the ids become the number of a row
that is out of range: runtimes that check these refuse it, as PyTorch does.
"""

import torch
from torch import Tensor

from torchembed.modules.dense_part.forms import BadIds, Combining
from torchembed.ops.bags_without_search import bags_of_ids


def look_up(
    weight: Tensor,
    ids: Tensor,
    *,
    lengths: Tensor | None,
    weights: Tensor | None,
    combining: Combining,
    padding_id: int | None,
    bad_ids: BadIds,
) -> Tensor:
    """The vectors of a lookup: ``[B, D]``; of each id ``[B, hotness, D]``, or ``[L, D]`` of jagged
    bags. Float32, and float64 of float64 rows.

    Args:
        weight: ``[R, D]``, floating.
        ids: int32 or int64, ``[B, hotness]``, or ``[L]`` of jagged bags.
        lengths: of the bags, an integer ``[B]``; None where their hotness is fixed.
        weights: one for each id, floating, in the form of ``ids``.
        padding_id: an id that pooled bags are looked up without.
    """
    if lengths is None and combining is not Combining.EACH and ids.shape[1] == 1:
        # A bag of one id is its vector, which a gather by [B] gives without a copy.
        return look_up(
            weight,
            ids.squeeze(1),
            lengths=None,
            weights=None if weights is None else weights.squeeze(1),
            combining=Combining.EACH,
            padding_id=padding_id,
            bad_ids=bad_ids,
        )
    num_rows = weight.shape[0]
    is_left_out: Tensor | None = None
    if bad_ids is BadIds.CLAMP:
        rows = ids = ids.clamp(0, num_rows - 1)
    elif bad_ids is BadIds.ZERO:
        is_left_out = (ids < 0) | (ids >= num_rows)
        rows = torch.where(is_left_out, 0, ids)
    else:
        # Indices below 0 count from the end.
        rows = torch.where(ids < 0, num_rows, ids)
    is_padding = None if padding_id is None else ids == padding_id
    if is_padding is not None:
        is_left_out = is_padding if is_left_out is None else is_left_out | is_padding
    vectors = torch.nn.functional.embedding(rows, weight)
    vectors = vectors.to(torch.promote_types(weight.dtype, torch.float32))
    if weights is not None:
        vectors = vectors * weights.to(vectors.dtype).unsqueeze(-1)
    if is_left_out is not None:
        vectors = torch.where(is_left_out.unsqueeze(-1), 0.0, vectors)
    if combining is not Combining.EACH:
        vectors = (
            _pooled(vectors, is_padding, combining)
            if lengths is None
            else _pooled_jagged(vectors, lengths, is_padding, combining)
        )
    if lengths is None:
        return vectors
    # What lengths do not fit is made of a row that there is none of.
    # Counted, since onnxruntime's maximum of no sample is any number.
    num_negative = (lengths < 0).long().sum()
    is_misfit = (num_negative > 0) | (lengths.long().sum() != ids.shape[0])
    no_row = torch.nn.functional.embedding(is_misfit.long() * num_rows, weight)
    return torch.where(is_misfit, no_row.to(vectors.dtype), vectors)


def _pooled(vectors: Tensor, is_padding: Tensor | None, combining: Combining) -> Tensor:
    total = vectors.sum(1)
    if combining is Combining.SUM:
        return total
    if is_padding is None:
        return total / vectors.shape[1]
    counts = (~is_padding).to(vectors.dtype).sum(1, keepdim=True)
    return total / counts.clamp_min(1.0)


def _pooled_jagged(
    vectors: Tensor, lengths: Tensor, is_padding: Tensor | None, combining: Combining
) -> Tensor:
    bags = bags_of_ids(lengths, vectors.shape[0])
    batch_size = lengths.shape[0]
    total = vectors.new_zeros(batch_size, vectors.shape[1]).index_add(0, bags, vectors)
    if combining is Combining.SUM:
        return total
    counts = lengths.to(vectors.dtype)
    if is_padding is not None:
        kept = (~is_padding).to(vectors.dtype)
        counts = vectors.new_zeros(batch_size).index_add(0, bags, kept)
    return total / counts.clamp_min(1.0).unsqueeze(1)
