"""Defines the ``torchembed::pooled_lookup_*`` operations and picks their kernels."""

import torch
from torch import Tensor

from torchembed import _native
from torchembed.core.dispatch import define_op
from torchembed.ops.pooled_lookup.checks import (
    check_pooled_lookup_forward,
    check_pooled_lookup_forward_contents,
    check_pooled_lookup_gradient_map,
    check_pooled_lookup_gradient_map_contents,
    check_pooled_lookup_weights_backward,
    check_pooled_lookup_weights_backward_contents,
)
from torchembed.ops.pooled_lookup.reference import (
    pooled_lookup_forward_reference,
    pooled_lookup_gradient_map_reference,
    pooled_lookup_weights_backward_reference,
)

_TRITON = "torchembed.triton_kernels.pooled_lookup"


def _forward_fake(
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    per_id_weights: Tensor | None,
    num_features: int,
    batch_size: int,
    mean: bool,
    output_dtype: torch.dtype,
) -> Tensor:
    return weight.new_empty(batch_size, num_features, weight.shape[1], dtype=output_dtype)


def _gradient_map_fake(
    ids_like: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    per_id_weights: Tensor | None,
    num_features: int,
    batch_size: int,
    mean: bool,
) -> tuple[Tensor, Tensor]:
    num_scales = ids_like.shape[0] if mean or per_id_weights is not None else 0
    return (
        ids_like.new_empty(ids_like.shape[0], dtype=torch.int32),
        ids_like.new_empty(num_scales, dtype=torch.float32),
    )


def _weights_backward_fake(
    grad: Tensor,
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    mean: bool,
) -> Tensor:
    return rows.new_empty(rows.shape[0], dtype=torch.float32)


pooled_lookup_forward_op = define_op(
    "pooled_lookup_forward(Tensor weight, Tensor rows, Tensor? offsets, int[] hotness,"
    " Tensor? per_id_weights, int num_features, SymInt batch_size, bool mean,"
    " ScalarType output_dtype) -> Tensor",
    reference=pooled_lookup_forward_reference,
    fake=_forward_fake,
    triton=f"{_TRITON}:launch_pooled_lookup_forward",
    native=_native.native_op("pooled_lookup_forward"),
    check=check_pooled_lookup_forward,
    check_contents=check_pooled_lookup_forward_contents,
)
pooled_lookup_gradient_map_op = define_op(
    "pooled_lookup_gradient_map(Tensor ids_like, Tensor? offsets, int[] hotness,"
    " Tensor? per_id_weights, int num_features, SymInt batch_size, bool mean)"
    " -> (Tensor, Tensor)",
    reference=pooled_lookup_gradient_map_reference,
    fake=_gradient_map_fake,
    triton="torchembed.triton_kernels.gradient_map:launch_pooled_lookup_gradient_map",
    native=_native.native_op("pooled_lookup_gradient_map"),
    check=check_pooled_lookup_gradient_map,
    check_contents=check_pooled_lookup_gradient_map_contents,
)
pooled_lookup_weights_backward_op = define_op(
    "pooled_lookup_weights_backward(Tensor grad, Tensor weight, Tensor rows, Tensor? offsets,"
    " int[] hotness, bool mean) -> Tensor",
    reference=pooled_lookup_weights_backward_reference,
    fake=_weights_backward_fake,
    triton=f"{_TRITON}:launch_pooled_lookup_weights_backward",
    native=_native.native_op("pooled_lookup_weights_backward"),
    check=check_pooled_lookup_weights_backward,
    check_contents=check_pooled_lookup_weights_backward_contents,
)
