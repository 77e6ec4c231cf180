"""The public functions ``permute_features`` and ``bucketize_rows``."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.autograd.first_order import creates_graph
from torchembed.core.function_context import FunctionContext
from torchembed.core.stand_ins import in_transform, makes_stand_ins
from torchembed.ops.jagged.checks import check_permutation
from torchembed.ops.jagged.schema import (
    bucketize_rows_op,
    permute_features_backward_op,
    permute_features_forward_op,
)


class PermutedFeatures(NamedTuple):
    """Result of :func:`permute_features`, for ``K`` features."""

    values: Tensor
    """``[num_ids]``."""
    offsets: Tensor
    """``[K * B + 1]``, dtype of the given offsets."""
    weights: Tensor | None
    """``[num_ids]``, None where none were given."""


class BucketizedRows(NamedTuple):
    """Result of :func:`bucketize_rows`, for ``W`` buckets."""

    values: Tensor
    """``[L]``, bucket-major: ids less the first id of their bucket, -1 for bad ids."""
    offsets: Tensor
    """``[W * F * B + 1]``, dtype of the given offsets."""
    weights: Tensor | None
    """``[L]``, in the order of ``values``; None where none were given."""
    positions: Tensor
    """``[L]``, int32: the position of each given id in ``values``."""


class _PermuteFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        permutation: list[int],
        num_features: int,
        batch_size: int,
        num_ids: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        arrangement = (permutation, num_features, batch_size)
        new_values, new_offsets, new_weights = permute_features_forward_op(
            values, offsets, weights, *arrangement, num_ids
        )
        ctx.save_for_backward(offsets, new_offsets)
        ctx.arrangement, ctx.num_values = arrangement, values.shape[0]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(new_offsets)
        return new_values, new_offsets, new_weights

    @staticmethod
    def backward(
        ctx: FunctionContext, grad_values: Tensor | None, _: None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        def gradient(grad: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            if creates_graph():
                num_values, (offsets, _) = ctx.num_values, ctx.saved_tensors
                permutation, num_features, batch_size = ctx.arrangement
                arrangement = permutation, num_features, batch_size, grad.shape[0]
                found = _places(num_values, offsets, *arrangement)
                return _sums(grad, found, num_values)
            return permute_features_backward_op(
                grad.contiguous(), *ctx.saved_tensors, *ctx.arrangement, ctx.num_values
            )

        return gradient(grad_values), None, gradient(grad_weights), *[None] * 4


class _Places(NamedTuple):
    """The former places of the values of a permuted batch."""

    places: Tensor
    """int64 ``[num_ids]``."""
    is_spare: Tensor
    """bool ``[num_ids]``."""
    offsets: Tensor
    """``[K * B + 1]``."""


def _places(
    num_values: int,
    offsets: Tensor,
    permutation: list[int],
    num_features: int,
    batch_size: int,
    num_ids: int,
) -> _Places:
    numbers = torch.arange(num_values, device=offsets.device)
    places, new_offsets, _ = permute_features_forward_op(
        numbers, offsets, None, permutation, num_features, batch_size, num_ids
    )
    is_spare = torch.arange(num_ids, device=offsets.device) >= new_offsets[-1]
    return _Places(places, is_spare, new_offsets)


def _sums(grad: Tensor, found: _Places, num_values: int) -> Tensor:
    """The sum of the gradients of each value, ``[num_values]``, by operations of PyTorch, which can
    be differentiated."""
    sums = torch.zeros(num_values, dtype=torch.float32, device=grad.device)
    grad_of_values = grad.float().masked_fill(found.is_spare, 0.0)
    return sums.index_add(0, found.places, grad_of_values).to(grad.dtype)


def _permuted_by_torch(values: Tensor, weights: Tensor | None, found: _Places) -> PermutedFeatures:
    """Permuted features by operations of PyTorch, which ``torch.func`` sees through."""

    def permuted(numbers: Tensor) -> Tensor:
        if numbers.shape[0] == 0:
            return numbers.new_zeros(found.places.shape)
        return numbers[found.places].masked_fill(found.is_spare, 0)

    of_weights = None if weights is None else permuted(weights)
    return PermutedFeatures(permuted(values), found.offsets, of_weights)


class _BucketizeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        boundaries: Tensor,
        batch_size: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        local, new_offsets, new_weights, positions = bucketize_rows_op(
            values, offsets, weights, boundaries, batch_size
        )
        ctx.save_for_backward(positions)
        ctx.mark_non_differentiable(local, new_offsets, positions)
        return local, new_offsets, new_weights, positions

    @staticmethod
    def backward(ctx: FunctionContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        return None, None, grads[2].index_select(0, positions), None, None


def permute_features(
    values: Tensor,
    offsets: Tensor,
    permutation: Sequence[int],
    *,
    num_features: int,
    batch_size: int,
    num_ids: int | None = None,
    weights: Tensor | None = None,
) -> PermutedFeatures:
    """The bags of features in another order; features may be repeated or left out.

    Bag ``(k, b)`` of the result is bag ``(permutation[k], b)`` of the batch. Values and weights
    that require a gradient get one; the gradients of a repeated feature are summed in float32, in
    the order of the permutation. Deterministic; never synchronizes.

    Worked example: three features of one sample, ``values = [7, 8, 9]``,
    ``offsets = [0, 1, 1, 3]``, ``permutation = [2, 1, 0]``: the result has ``values = [8, 9, 7]``,
    ``offsets = [0, 2, 2, 3]``.

    Args:
        values: ``[L]``, int32, int64, float32, float16 or bfloat16, feature-major.
        offsets: ``[num_features * batch_size + 1]``, int32 or int64.
        permutation: for each feature of the result a feature in ``[0, num_features)``.
        num_ids: capacity of the result. Needed where ``permutation`` repeats features or leaves
            some out, since only the caller can know it without a synchronization; L where None.
            Spare positions hold zeros. Too small a number is an error on the CPU and drops the last
            ids on a GPU.
        weights: ``[L]``, floating, one for each value.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit, a feature that is not
            there, or too small a ``num_ids``.
    """
    permutation = list(permutation)
    if sorted(permutation) == list(range(num_features)):
        num_ids = values.shape[0] if num_ids is None else num_ids
    elif num_ids is None:
        check_permutation(permutation, num_features)
        raise ValueError(
            f"num_ids must be given, since permutation {permutation} repeats or leaves out some of "
            f"the {num_features} features; sum the lengths of the features it names"
        )
    if in_transform():
        arrangement = permutation, num_features, batch_size, num_ids
        found = _places(values.shape[0], offsets.contiguous(), *arrangement)
        return _permuted_by_torch(values, weights, found)
    new_values, new_offsets, new_weights = _PermuteFeatures.apply(
        values.contiguous(),
        offsets.contiguous(),
        None if weights is None else weights.contiguous(),
        permutation,
        num_features,
        batch_size,
        num_ids,
    )
    if values.device.type == "cpu" and not torch.compiler.is_compiling() and not makes_stand_ins():
        _check_room(num_ids, new_offsets, permutation)
    return PermutedFeatures(new_values, new_offsets, None if weights is None else new_weights)


def _check_room(num_ids: int, offsets: Tensor, permutation: list[int]) -> None:
    """Raise ``ValueError`` where ``offsets`` end behind ``num_ids``; a GPU is not waited for."""
    needed = int(offsets[-1])
    if num_ids < needed:
        raise ValueError(
            f"num_ids must be {needed} or more, the ids of features {permutation}, got {num_ids}"
        )


def bucketize_rows(
    values: Tensor,
    offsets: Tensor,
    boundaries: Tensor,
    *,
    batch_size: int,
    weights: Tensor | None = None,
) -> BucketizedRows:
    """Split the ids of each bag by row range into buckets, one for each shard of the rows.

    Bucket w of feature f takes the ids in ``[boundaries[f, w], boundaries[f, w + 1])`` and holds
    them less ``boundaries[f, w]``; bag ``(f, b)`` of bucket w is bag ``(w * F + f) * B + b`` of the
    result. An id in none of the ranges becomes -1 in the first bucket whose range is not empty (the
    last where all are empty), so that none is lost and a table on one rank keeps its bad ids;
    spare positions from ``offsets[-1]`` on stay behind all bags, as -1. The order within a bag is
    kept. Every shape follows from the arguments' shapes; deterministic, never synchronizes.

    ``positions`` inverts the permutation: id p became ``values[positions[p]]`` of the result, and
    the gradient of ``weights`` is gathered by it.

    Worked example: one feature, two samples, ``values = [5, 0, 9, 3]``, ``offsets = [0, 3, 4]``,
    ``boundaries = [[0, 4, 8]]``: ``values = [0, -1, 3, 1]``, ``offsets = [0, 2, 3, 4, 4]``,
    ``positions = [3, 0, 1, 2]``.

    Args:
        values: ids, ``[L]``, int32 or int64, feature-major; L < 2**31.
        offsets: ``[F * batch_size + 1]``, int32 or int64.
        boundaries: int64 ``[F, W + 1]`` for W buckets, each row not decreasing; not checked.
        weights: ``[L]``, floating, one for each id; gets a gradient where it requires one.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    local, new_offsets, new_weights, positions = _BucketizeRows.apply(
        values.contiguous(),
        offsets.contiguous(),
        None if weights is None else weights.contiguous(),
        boundaries.contiguous(),
        batch_size,
    )
    return BucketizedRows(local, new_offsets, None if weights is None else new_weights, positions)
