"""The specification of the ``pointwise_attention_*`` operations in eager torch.

Rows are padded to ``[B, H, max_length, D]``, and all scores are in memory.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchembed.core.padded_dense import padded_dense
from torchembed.core.types import LOG_SECONDS_OF_A_BUCKET
from torchembed.ops.padded_layout import PaddedLayout


class _Scores(NamedTuple):
    """Scores of padded rows, and what they are made of."""

    layout: PaddedLayout
    query: Tensor
    """``[B, H, max_length, D]``, and so ``key`` and ``value``."""
    key: Tensor
    value: Tensor
    buckets: Tensor | None
    """int64 ``[B, max_length, max_length]``: of the time from each item, the last dimension, to
    the request after each."""
    is_later: Tensor
    """bool ``[max_length, max_length]``: True for columns after the row."""
    scores: Tensor
    """``[B, H, max_length, max_length]``."""


def _scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    distance_bias: Tensor,
    time_bias: Tensor | None,
    times: Tensor | None,
    next_times: Tensor | None,
) -> _Scores:
    max_length = distance_bias.shape[0]
    layout = PaddedLayout.of(offsets, max_length, query.shape[0])
    query, key, value = (_padded(layout, rows) for rows in (query, key, value))
    distances = _distances(distance_bias)
    bias = distance_bias[distances.clamp_min(0)]
    scores, buckets = query @ key.mT + bias, None
    if time_bias is not None and times is not None and next_times is not None:
        buckets = _buckets(times, next_times, offsets, max_length, time_bias.shape[0])
        of_times = time_bias.index_select(0, buckets.flatten())
        scores = scores + of_times.view_as(buckets).unsqueeze(1)
    return _Scores(layout, query, key, value, buckets, distances < 0, scores)


def _padded(layout: PaddedLayout, rows: Tensor) -> Tensor:
    """``[B, H, max_length, D]`` of ``rows [L, H, D]``."""
    return layout.pad(rows).transpose(1, 2)


def _distances(distance_bias: Tensor) -> Tensor:
    """int64 ``[max_length, max_length]``: how many places each column is before each row."""
    places = torch.arange(distance_bias.shape[0], device=distance_bias.device)
    return places.unsqueeze(1) - places


def _buckets(
    times: Tensor, next_times: Tensor, offsets: Tensor, max_length: int, num_buckets: int
) -> Tensor:
    times, next_times = (padded_dense(of, offsets, max_length, 0) for of in (times, next_times))
    seconds = (next_times.unsqueeze(2) - times.unsqueeze(1)).abs().clamp_min(1)
    # Exact enough that every device and kernel finds the same bucket of each whole second.
    buckets = (seconds.double().log() * (1 / LOG_SECONDS_OF_A_BUCKET)).long()
    return buckets.clamp_max(num_buckets - 1)


def pointwise_attention_forward_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    distance_bias: Tensor,
    time_bias: Tensor | None,
    times: Tensor | None,
    next_times: Tensor | None,
) -> Tensor:
    of = _scores(query, key, value, offsets, distance_bias, time_bias, times, next_times)
    weights = (F.silu(of.scores) / distance_bias.shape[0]).masked_fill(of.is_later, 0.0)
    return of.layout.pack((weights.to(value.dtype) @ of.value).transpose(1, 2))


def pointwise_attention_backward_reference(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    distance_bias: Tensor,
    time_bias: Tensor | None,
    times: Tensor | None,
    next_times: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    of = _scores(query, key, value, offsets, distance_bias, time_bias, times, next_times)
    max_length, dtype = distance_bias.shape[0], query.dtype
    grad = _padded(of.layout, grad)
    weights = (F.silu(of.scores) / max_length).masked_fill_(of.is_later, 0.0)
    grad_weights = (grad @ of.value.mT).to(of.scores.dtype)
    grad_scores = torch.ops.aten.silu_backward(grad_weights / max_length, of.scores)
    grad_scores.masked_fill_(of.is_later, 0.0)
    grads = (
        grad_scores.to(dtype) @ of.key,
        grad_scores.to(dtype).mT @ of.query,
        weights.to(dtype).mT @ grad,
    )
    # Of each row the scores at distance 0, 1 and so on, then of all rows.
    of_pairs = grad_scores.sum((0, 1), dtype=torch.float32)
    distances = _distances(distance_bias)
    grad_distance_bias = of_pairs.gather(1, distances.clamp_min(0)).tril().sum(0)
    grad_time_bias = query.new_empty(0)
    if time_bias is not None and of.buckets is not None:
        sums = torch.zeros_like(time_bias, dtype=torch.float32)
        of_times = grad_scores.sum(1, dtype=torch.float32)
        sums.index_add_(0, of.buckets.flatten(), of_times.flatten())
        grad_time_bias = sums.to(time_bias.dtype)
    grad_query, grad_key, grad_value = (of.layout.pack(g.transpose(1, 2)) for g in grads)
    return (
        grad_query,
        grad_key,
        grad_value,
        grad_distance_bias.to(distance_bias.dtype),
        grad_time_bias,
    )
