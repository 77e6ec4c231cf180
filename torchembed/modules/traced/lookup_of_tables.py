"""Lookups in several tables at once whose weights are arguments one by one, as programs of
``torch.compile`` and ``torch.export`` have them.

Where the weights are those of a whole group one lookup serves them all; a program that was loaded
has weights of its own, which are looked up table by table. Neither copies a weight.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.function_context import FunctionContext
from torchembed.modules.lookup.feature_selection import select_features
from torchembed.modules.traced.recording_op import record_op
from torchembed.ops.pooled_lookup.schema import (
    pooled_lookup_forward_op,
    pooled_lookup_gradient_map_op,
    pooled_lookup_weights_backward_op,
)
from torchembed.ops.row_gradients import WeightGradient, table_gradient
from torchembed.ops.rowwise_update import RowGradients
from torchembed.ops.sequence_lookup.schema import sequence_lookup_forward_op
from torchembed.tables import table_at


def _flat(weights: Sequence[Tensor]) -> Tensor | None:
    """The memory of ``weights`` as one, where they are all tables of a group, in its order."""
    if len(weights) == 1:
        return weights[0].contiguous()
    tables = [table_at(weight) for weight in weights]
    group = None if tables[0] is None else tables[0].group
    if group is None or group.tables != tables or group.weight.dtype != weights[0].dtype:
        return None
    return group.weight


def _first_rows(weights: Sequence[Tensor]) -> list[int]:
    return list(itertools.accumulate((len(weight) for weight in weights), initial=0))


def _rows_of(rows: Tensor, first: int, end: int) -> Tensor:
    """``rows`` numbered from ``first`` on, -1 for those that are not in ``[first, end)``."""
    return torch.where((rows >= first) & (rows < end), rows - first, -1)


def _pooled(
    anchor: Tensor | None,
    weights: Sequence[Tensor],
    rows: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    num_features: Sequence[int],
    batch_size: int,
    mean: bool,
    output_dtype: torch.dtype,
) -> Tensor:
    total, flat = sum(num_features), _flat(weights)
    if flat is not None:
        return pooled_lookup_forward_op(
            flat, rows, offsets, [], per_id_weights, total, batch_size, mean, output_dtype
        )
    batch = SparseFeatures(
        keys=tuple(map(str, range(total))),
        values=rows,
        batch_size=batch_size,
        offsets=offsets,
        weights=per_id_weights,
    )
    parts, first_feature, first_rows = [], 0, _first_rows(weights)
    for weight, count, (first, end) in zip(
        weights, num_features, itertools.pairwise(first_rows), strict=True
    ):
        part = select_features(batch, range(first_feature, first_feature + count))
        first_feature += count
        assert part.offsets is not None
        parts.append(
            pooled_lookup_forward_op(
                weight.contiguous(),
                _rows_of(part.values, first, end),
                part.offsets,
                [],
                part.weights,
                count,
                batch_size,
                mean,
                output_dtype,
            )
        )
    return torch.cat(parts, dim=1)


def _pooled_fake(
    anchor: Tensor | None,
    weights: Sequence[Tensor],
    rows: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    num_features: Sequence[int],
    batch_size: int,
    mean: bool,
    output_dtype: torch.dtype,
) -> Tensor:
    shape = batch_size, sum(num_features), weights[0].shape[1]
    return weights[0].new_empty(shape, dtype=output_dtype)


def _vectors(
    anchor: Tensor | None, weights: Sequence[Tensor], rows: Tensor, output_dtype: torch.dtype
) -> Tensor:
    flat = _flat(weights)
    if flat is not None:
        return sequence_lookup_forward_op(flat, rows, output_dtype)
    vectors = weights[0].new_zeros(rows.numel(), weights[0].shape[1], dtype=output_dtype)
    for weight, (first, end) in zip(weights, itertools.pairwise(_first_rows(weights)), strict=True):
        # Waits for a GPU, for as many ids as the table has.
        places = ((rows >= first) & (rows < end)).nonzero().squeeze(1)
        of_table = rows[places] - first
        vectors[places] = sequence_lookup_forward_op(weight.contiguous(), of_table, output_dtype)
    return vectors


def _vectors_fake(
    anchor: Tensor | None, weights: Sequence[Tensor], rows: Tensor, output_dtype: torch.dtype
) -> Tensor:
    return weights[0].new_empty(rows.shape[0], weights[0].shape[1], dtype=output_dtype)


def _weights_backward(
    grad: Tensor, weights: Sequence[Tensor], rows: Tensor, offsets: Tensor, mean: bool
) -> Tensor:
    flat = _flat(weights)
    flat = torch.cat(list(weights)) if flat is None else flat
    return pooled_lookup_weights_backward_op(grad, flat, rows, offsets, [], mean)


def _weights_backward_fake(
    grad: Tensor, weights: Sequence[Tensor], rows: Tensor, offsets: Tensor, mean: bool
) -> Tensor:
    return rows.new_empty(rows.shape[0], dtype=torch.float32)


_pooled_op = torch.library.custom_op(
    "torchembed::pooled_lookup_of_tables",
    _pooled,
    mutates_args=(),
    schema="(Tensor? anchor, Tensor[] weights, Tensor rows, Tensor offsets,"
    " Tensor? per_id_weights, int[] num_features, SymInt batch_size, bool mean,"
    " ScalarType output_dtype) -> Tensor",
)
_pooled_op.register_fake(_pooled_fake)
_vectors_op = torch.library.custom_op(
    "torchembed::sequence_lookup_of_tables",
    _vectors,
    mutates_args=(),
    schema="(Tensor? anchor, Tensor[] weights, Tensor rows, ScalarType output_dtype) -> Tensor",
)
_vectors_op.register_fake(_vectors_fake)
_weights_backward_op = torch.library.custom_op(
    "torchembed::pooled_lookup_of_tables_weights_backward",
    _weights_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor[] weights, Tensor rows, Tensor offsets, bool mean) -> Tensor",
)
_weights_backward_op.register_fake(_weights_backward_fake)


def _table_gradients(
    rows: Tensor, gradients: RowGradients, weights: Sequence[Tensor]
) -> list[Tensor]:
    counts = [weight.shape[0] for weight in weights]
    shape = torch.Size((sum(counts), gradients.grad.shape[1]))
    total = table_gradient(rows, gradients, shape, torch.float32, WeightGradient.DENSE)
    parts = zip(total.split(counts), weights, strict=True)
    return [part.to(weight.dtype) for part, weight in parts]


def _gradients(
    ctx: FunctionContext, rows: Tensor, gradients: RowGradients, weights: Sequence[Tensor]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of the anchor and of the weights; where it is there, rows' are recorded."""
    if ctx.is_recorded:
        return record_op(weights, rows, *gradients), [None] * len(weights)
    return None, [*_table_gradients(rows, gradients, weights)]


def _keep_pooled(
    ctx: FunctionContext,
    inputs: tuple[
        Tensor | None,
        list[Tensor],
        Tensor,
        Tensor,
        Tensor | None,
        list[int],
        int,
        bool,
        torch.dtype,
    ],
    output: Tensor,
) -> None:
    anchor, weights, rows, offsets, per_id_weights, _, _, mean, _ = inputs
    ctx.save_for_backward(rows, offsets, per_id_weights, *weights)
    ctx.is_recorded, ctx.mean = anchor is not None, mean


def _pooled_backward(
    ctx: FunctionContext, grad: Tensor
) -> tuple[Tensor | list[Tensor | None] | None, ...]:
    rows, offsets, per_id_weights, *weights = ctx.saved_tensors
    batch_size, num_features, dim = grad.shape
    grad, of_ids = grad.contiguous(), None
    if per_id_weights is not None and ctx.needs_input_grad[4]:
        of_ids = _weights_backward_op(grad, weights, rows, offsets, ctx.mean)
        of_ids = of_ids.to(per_id_weights.dtype)
    gradient_rows, scales = pooled_lookup_gradient_map_op(
        rows, offsets, [], per_id_weights, num_features, batch_size, ctx.mean
    )
    has_scales = ctx.mean or per_id_weights is not None
    gradients = RowGradients(
        grad.view(batch_size * num_features, dim), gradient_rows, scales if has_scales else None
    )
    of_anchor, of_weights = _gradients(ctx, rows, gradients, weights)
    return of_anchor, of_weights, None, None, of_ids, None, None, None, None


def _keep_sequence(
    ctx: FunctionContext,
    inputs: tuple[Tensor | None, list[Tensor], Tensor, torch.dtype],
    output: Tensor,
) -> None:
    anchor, weights, rows, _ = inputs
    ctx.save_for_backward(rows, *weights)
    ctx.is_recorded = anchor is not None


def _sequence_backward(
    ctx: FunctionContext, grad: Tensor
) -> tuple[Tensor | list[Tensor | None] | None, ...]:
    rows, *weights = ctx.saved_tensors
    gradients = RowGradients(grad.contiguous())
    return *_gradients(ctx, rows, gradients, weights), None, None


_pooled_op.register_autograd(_pooled_backward, setup_context=_keep_pooled)
_vectors_op.register_autograd(_sequence_backward, setup_context=_keep_sequence)


def pooled_lookup_of_tables(
    weights: Sequence[Tensor],
    rows: Tensor,
    *,
    offsets: Tensor,
    num_features: Sequence[int],
    batch_size: int,
    per_id_weights: Tensor | None,
    mean: bool,
    output_dtype: torch.dtype,
    anchor: Tensor | None = None,
) -> Tensor:
    """The pooled vectors of bags of rows of several tables, ``[B, F, D]``.

    Args:
        weights: each ``[R, D]``, float32, float16 or bfloat16; they get dense gradients.
        rows: ``[L]``, int32 or int64, numbered through all weights, -1 for none; feature-major.
        offsets: ``[F * B + 1]``.
        num_features: of each weight; the features of one come one after the other.
        per_id_weights: ``[L]``, floating; gets a gradient where it requires one.
        mean: whether sums are divided by the number of ids of their bag.
        output_dtype: float32, float16 or bfloat16.
        anchor: that of the group whose tables' parameters are ``weights``, in its order, detached:
            its fused optimizer gets the gradients of rows in their place.
    """
    return _pooled_op(
        anchor,
        weights,
        rows,
        offsets.contiguous(),
        None if per_id_weights is None else per_id_weights.contiguous(),
        list(num_features),
        batch_size,
        mean,
        output_dtype,
    )


def sequence_lookup_of_tables(
    weights: Sequence[Tensor],
    rows: Tensor,
    *,
    output_dtype: torch.dtype,
    anchor: Tensor | None = None,
) -> Tensor:
    """The vector of each of ``rows [L]``, numbered through all ``weights``, ``[L, D]``; zeros for
    -1. Arguments as for :func:`pooled_lookup_of_tables`."""
    return _vectors_op(anchor, weights, rows, output_dtype)
