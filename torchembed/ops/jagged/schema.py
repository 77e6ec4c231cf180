"""Defines the ``torchembed::`` operations of the jagged family and picks their kernels."""

import torch
from torch import Tensor

from torchembed.core.dispatch import define_op
from torchembed.ops.jagged.checks import (
    check_bucketize_rows,
    check_bucketize_rows_contents,
    check_permute_features_backward,
    check_permute_features_backward_contents,
    check_permute_features_forward,
    check_permute_features_forward_contents,
)
from torchembed.ops.jagged.reference import (
    bucketize_rows_reference,
    permute_features_backward_reference,
    permute_features_forward_reference,
)

_TRITON = "torchembed.triton_kernels.jagged"


def _like_weights(weights: Tensor | None, values: Tensor, num_ids: int) -> Tensor:
    return values.new_empty(0) if weights is None else weights.new_empty(num_ids)


def _permute_features_forward_fake(
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    permutation: list[int],
    num_features: int,
    batch_size: int,
    num_ids: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        values.new_empty(num_ids),
        offsets.new_empty(len(permutation) * batch_size + 1),
        _like_weights(weights, values, num_ids),
    )


def _permute_features_backward_fake(
    grad: Tensor,
    offsets: Tensor,
    new_offsets: Tensor,
    permutation: list[int],
    num_features: int,
    batch_size: int,
    num_values: int,
) -> Tensor:
    return grad.new_empty(num_values)


def _bucketize_rows_fake(
    values: Tensor, offsets: Tensor, weights: Tensor | None, boundaries: Tensor, batch_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_ids = values.shape[0]
    num_buckets = boundaries.shape[1] - 1
    return (
        values.new_empty(num_ids),
        offsets.new_empty(num_buckets * (offsets.shape[0] - 1) + 1),
        _like_weights(weights, values, num_ids),
        values.new_empty(num_ids, dtype=torch.int32),
    )


permute_features_forward_op = define_op(
    "permute_features_forward(Tensor values, Tensor offsets, Tensor? weights, int[] permutation,"
    " int num_features, SymInt batch_size, SymInt num_ids) -> (Tensor, Tensor, Tensor)",
    reference=permute_features_forward_reference,
    fake=_permute_features_forward_fake,
    triton=f"{_TRITON}:launch_permute_features_forward",
    check=check_permute_features_forward,
    check_contents=check_permute_features_forward_contents,
)
permute_features_backward_op = define_op(
    "permute_features_backward(Tensor grad, Tensor offsets, Tensor new_offsets, int[] permutation,"
    " int num_features, SymInt batch_size, SymInt num_values) -> Tensor",
    reference=permute_features_backward_reference,
    fake=_permute_features_backward_fake,
    triton=f"{_TRITON}:launch_permute_features_backward",
    check=check_permute_features_backward,
    check_contents=check_permute_features_backward_contents,
)
bucketize_rows_op = define_op(
    "bucketize_rows(Tensor values, Tensor offsets, Tensor? weights, Tensor boundaries,"
    " SymInt batch_size) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=bucketize_rows_reference,
    fake=_bucketize_rows_fake,
    triton=f"{_TRITON}:launch_bucketize_rows",
    check=check_bucketize_rows,
    check_contents=check_bucketize_rows_contents,
)
