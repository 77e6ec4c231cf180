"""Requirements of the ``pointwise_attention_*`` operations on their arguments."""

import torch
from torch import Tensor

from torchembed.core import checks, contents

MOST_COLUMNS = 512
"""Columns of a head: kernels hold whole rows of a block in registers."""


def check_pointwise_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    distance_bias: Tensor,
    time_bias: Tensor | None,
    times: Tensor | None,
    next_times: Tensor | None,
) -> None:
    checks.check_float("query", query)
    checks.check_dim("query", query, 3)
    if query.shape[2] > MOST_COLUMNS:
        raise ValueError(
            f"query must have at most {MOST_COLUMNS} columns of a head, got {query.shape[2]}; "
            "divide them among more heads"
        )
    for name, other in (("key", key), ("value", value)):
        checks.check_dtype(name, other, (query.dtype,), "cast it as query is")
        checks.check_shape(name, other, query.shape, "that of query")
    for name, rows in (("query", query), ("key", key), ("value", value)):
        checks.check_apart_rows(name, rows)
    checks.check_ids("offsets", offsets)
    if not offsets.numel():
        raise ValueError("offsets must hold one number more than there are histories, got none")
    for name, bias in (("distance_bias", distance_bias), ("time_bias", time_bias)):
        if bias is not None:
            _check_biases(name, bias)
    of_times = {"time_bias": time_bias, "times": times, "next_times": next_times}
    missing = [name for name, tensor in of_times.items() if tensor is None]
    if 0 < len(missing) < len(of_times):
        raise ValueError(
            "time_bias, times and next_times must be given together, or none of them, got "
            f"{' and '.join(missing)} None"
        )
    for name, seconds in (("times", times), ("next_times", next_times)):
        if seconds is not None:
            checks.check_dtype(name, seconds, (torch.int64,), "call .long()")
            checks.check_shape(name, seconds, query.shape[:1], "one for each row of query")
    contiguous = {"offsets": offsets, "distance_bias": distance_bias, **of_times}
    checks.check_same_device("query", query, key=key, value=value, **contiguous)
    for name, tensor in contiguous.items():
        if tensor is not None:
            checks.check_contiguous(name, tensor)


def _check_biases(name: str, bias: Tensor) -> None:
    checks.check_float(name, bias)
    checks.check_dim(name, bias, 1)
    if not bias.numel():
        raise ValueError(f"{name} must hold at least one bias, got none")


def check_pointwise_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    distance_bias: Tensor,
    time_bias: Tensor | None,
    times: Tensor | None,
    next_times: Tensor | None,
) -> None:
    check_pointwise_attention_forward(
        query, key, value, offsets, distance_bias, time_bias, times, next_times
    )
    checks.check_operand("grad", grad, query.shape, "that of query", "query", query)


def check_pointwise_attention_forward_contents(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, *others: Tensor | None
) -> None:
    contents.check_offsets("offsets", offsets, query.shape[0])


def check_pointwise_attention_backward_contents(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, *others: Tensor | None
) -> None:
    contents.check_offsets("offsets", offsets, query.shape[0])
