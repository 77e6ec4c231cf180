"""The public function ``pooled_lookup`` and its gradients of every order.

The product of a pooled lookup and a gradient of its result is linear in the table, in the weights
of ids and in that gradient. The gradient of each of the three is a function of the two others, with
kernels of its own; so the gradients of these functions are each other.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.autograd.first_order import creates_graph, no_second_derivative, refusing
from torchembed.core.function_context import FunctionContext
from torchembed.core.types import Pooling
from torchembed.ops.bags import hotness_of_bags
from torchembed.ops.pooled_lookup.checks import check_pooled_lookup_forward
from torchembed.ops.pooled_lookup.schema import (
    pooled_lookup_forward_op,
    pooled_lookup_gradient_map_op,
    pooled_lookup_weights_backward_op,
)
from torchembed.ops.row_gradients import (
    ONCE_RECORDED,
    GradientSink,
    WeightGradient,
    check_not_asked_for,
    table_gradient,
)
from torchembed.ops.rowwise_update import RowGradients

_SPARSE_AND_WEIGHTED = no_second_derivative(
    "a lookup with sparse gradients and weights of ids that are trained", "sparse=False"
)


class LookupInputs(NamedTuple):
    """The inputs of a pooled lookup, as :func:`pooled_lookup` takes them."""

    weight: Tensor
    rows: Tensor
    offsets: Tensor | None
    hotness: list[int]
    per_id_weights: Tensor | None
    num_features: int
    batch_size: int


LookupStore = Callable[[LookupInputs], None]
"""Function that pools the sums of a lookup and stores them itself."""


class _PooledLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext,
        weight: Tensor,
        rows: Tensor,
        offsets: Tensor | None,
        hotness: list[int],
        per_id_weights: Tensor | None,
        num_features: int,
        batch_size: int,
        mean: bool,
        output_dtype: torch.dtype,
        form: WeightGradient,
        sink: GradientSink | None,
        known_map: tuple[Tensor, Tensor] | None,
        store: LookupStore | None,
    ) -> Tensor:
        bags = (offsets, hotness, per_id_weights, num_features, batch_size)
        if store is None:
            out = pooled_lookup_forward_op(weight, rows, *bags, mean, output_dtype)
        else:
            check_pooled_lookup_forward(weight, rows, *bags, mean, output_dtype)
            store(LookupInputs(weight, rows, *bags))
            elsewhere = weight.new_zeros((), dtype=output_dtype)
            out = elsewhere.expand(batch_size, num_features, weight.shape[1])
        # The rows' contents matter to backward only for the gradient of per-id weights. Otherwise
        # the weight is not saved, so that an update before backward is no error.
        weights_need_grad = ctx.needs_input_grad[4]
        # R and the dtype are saved by a tensor without elements: Dynamo keeps no sizes in ctx.
        rows_like = weight.new_empty(weight.shape[0], 0)
        ctx.save_for_backward(
            weight if weights_need_grad else None, rows, offsets, per_id_weights, rows_like
        )
        ctx.hotness, ctx.mean, ctx.form, ctx.sink = hotness, mean, form, sink
        ctx.known_map = known_map
        return out

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, rows, offsets, per_id_weights, rows_like = ctx.saved_tensors
        is_differentiated, sink = creates_graph(), ctx.sink
        is_sparse = ctx.form is WeightGradient.SPARSE
        of_table = _TableGradient.apply if is_differentiated and not is_sparse else _table_gradient
        of_weights = _IdWeightGradient.apply if is_differentiated else _id_weight_gradient
        bags = offsets, ctx.hotness, ctx.mean
        grad_weight = grad_per_id_weights = None
        if sink is not None and is_differentiated:
            check_not_asked_for()
        elif is_sparse and is_differentiated and ctx.needs_input_grad[4]:
            raise RuntimeError(_SPARSE_AND_WEIGHTED)
        if ctx.needs_input_grad[4]:
            # Before the sink is called, since that may update the rows.
            assert per_id_weights is not None
            dtype = per_id_weights.dtype
            grad_per_id_weights = of_weights(grad, weight, rows, *bags, dtype)
            if sink is not None and is_differentiated:
                grad_per_id_weights = refusing(grad_per_id_weights, per_id_weights, ONCE_RECORDED)
        if ctx.needs_input_grad[0] and sink is None:
            known_map, form = ctx.known_map, ctx.form
            grad_weight = of_table(grad, per_id_weights, rows, rows_like, *bags, known_map, form)
        elif sink is not None and ctx.needs_input_grad[0]:
            with torch.no_grad():
                sink(rows, _row_gradients(grad, per_id_weights, rows, *bags, ctx.known_map))
        return grad_weight, None, None, None, grad_per_id_weights, *[None] * 8


class _TableGradient(torch.autograd.Function):
    """The dense gradient of the table, ``[R, D]``, as a function of the result's, ``[B, F, D]``,
    and of the weights of ids."""

    @staticmethod
    def forward(
        ctx: FunctionContext,
        grad: Tensor,
        per_id_weights: Tensor | None,
        rows: Tensor,
        rows_like: Tensor,
        offsets: Tensor | None,
        hotness: list[int],
        mean: bool,
        known_map: tuple[Tensor, Tensor] | None,
        form: WeightGradient,
    ) -> Tensor:
        saved = grad if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(saved, per_id_weights, rows, offsets)
        ctx.shape, ctx.dtype = grad.shape, grad.dtype
        ctx.hotness, ctx.mean, ctx.form = hotness, mean, form
        return _table_gradient(
            grad, per_id_weights, rows, rows_like, offsets, hotness, mean, known_map, form
        )

    @staticmethod
    def backward(ctx: FunctionContext, grad_table: Tensor) -> tuple[Tensor | None, ...]:
        grad, per_id_weights, rows, offsets = ctx.saved_tensors
        of_grad = of_weights = None
        if ctx.needs_input_grad[0]:
            of_grad = _looked_up(grad_table, per_id_weights, rows, offsets, ctx)
        if ctx.needs_input_grad[1]:
            assert per_id_weights is not None
            of_weights = _IdWeightGradient.apply(
                grad, grad_table, rows, offsets, ctx.hotness, ctx.mean, per_id_weights.dtype
            )
        return of_grad, of_weights, *[None] * 7


class _IdWeightGradient(torch.autograd.Function):
    """The gradient of the weights of ids, ``[L]``, as a function of the result's, ``[B, F, D]``,
    and of the table."""

    @staticmethod
    def forward(
        ctx: FunctionContext,
        grad: Tensor,
        weight: Tensor,
        rows: Tensor,
        offsets: Tensor | None,
        hotness: list[int],
        mean: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(grad, weight, rows, offsets)
        ctx.shape, ctx.dtype = grad.shape, grad.dtype
        ctx.hotness, ctx.mean = hotness, mean
        return _id_weight_gradient(grad, weight, rows, offsets, hotness, mean, dtype)

    @staticmethod
    def backward(ctx: FunctionContext, factors: Tensor) -> tuple[Tensor | None, ...]:
        grad, weight, rows, offsets = ctx.saved_tensors
        of_grad = of_weight = None
        if ctx.needs_input_grad[0]:
            of_grad = _looked_up(weight, factors, rows, offsets, ctx)
        if ctx.needs_input_grad[1]:
            rows_like = weight.new_empty(weight.shape[0], 0)
            bags = offsets, ctx.hotness, ctx.mean
            # A sum of gradients has one that is expanded from a number.
            of_weight = _TableGradient.apply(
                grad, factors.contiguous(), rows, rows_like, *bags, None, WeightGradient.DENSE
            )
        return of_grad, of_weight, *[None] * 5


def _looked_up(
    weight: Tensor,
    per_id_weights: Tensor | None,
    rows: Tensor,
    offsets: Tensor | None,
    ctx: FunctionContext,
) -> Tensor:
    """A lookup in another table, for the bags of ``ctx`` and of its dtype."""
    batch_size, num_features, _ = ctx.shape
    return pooled_lookup(
        weight,
        rows,
        offsets=offsets,
        hotness=ctx.hotness if offsets is None else None,
        batch_size=batch_size,
        num_features=num_features,
        per_id_weights=per_id_weights,
        pooling=Pooling.MEAN if ctx.mean else Pooling.SUM,
        output_dtype=ctx.dtype,
    )


def _row_gradients(
    grad: Tensor,
    per_id_weights: Tensor | None,
    rows: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    mean: bool,
    known_map: tuple[Tensor, Tensor] | None,
) -> RowGradients:
    batch_size, num_features, dim = grad.shape
    gradient_rows, scales = known_map or pooled_lookup_gradient_map_op(
        rows, offsets, hotness, per_id_weights, num_features, batch_size, mean
    )
    has_scales = mean or per_id_weights is not None
    of_bags = grad.contiguous().view(batch_size * num_features, dim)
    return RowGradients(of_bags, gradient_rows, scales if has_scales else None)


def _table_gradient(
    grad: Tensor,
    per_id_weights: Tensor | None,
    rows: Tensor,
    rows_like: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    mean: bool,
    known_map: tuple[Tensor, Tensor] | None,
    form: WeightGradient,
) -> Tensor:
    gradients = _row_gradients(grad, per_id_weights, rows, offsets, hotness, mean, known_map)
    shape = torch.Size((rows_like.shape[0], grad.shape[2]))
    return table_gradient(rows, gradients, shape, rows_like.dtype, form)


def _id_weight_gradient(
    grad: Tensor,
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    mean: bool,
    dtype: torch.dtype,
) -> Tensor:
    return pooled_lookup_weights_backward_op(
        grad.contiguous(), weight, rows, offsets, hotness, mean
    ).to(dtype)


def pooled_lookup(
    weight: Tensor,
    rows: Tensor,
    *,
    offsets: Tensor | None = None,
    hotness: Sequence[int] | None = None,
    batch_size: int,
    num_features: int = 1,
    per_id_weights: Tensor | None = None,
    pooling: Pooling = Pooling.SUM,
    output_dtype: torch.dtype | None = None,
    weight_form: WeightGradient = WeightGradient.DENSE,
    sink: GradientSink | None = None,
    known_map: tuple[Tensor, Tensor] | None = None,
    store: LookupStore | None = None,
) -> Tensor:
    """Pool the rows of each bag into one vector; all features of a table group in one call.

    ``out[b, f] = sum over positions p of bag (f, b) of per_id_weights[p] * weight[rows[p]]``,
    divided by the bag's number of ids under ``Pooling.MEAN``. An empty bag gives zeros. A row of -1
    gives zeros and gets no gradient, though a mean counts it. Sums are float32, in the order of the
    positions; deterministic, never synchronizes.

    Worked example: D = 1, ``weight = [[10], [20], [30]]``, one feature, ``rows = [0, 2, 2]``,
    ``offsets = [0, 2, 2, 3]``: the bags give 40, 0 and 30.

    Args:
        weight: ``[R, D]``, float32, float16 or bfloat16.
        rows: ``[L]``, int32 or int64, feature-major, each -1 or in ``[0, R)``; not checked, see
            :func:`~torchembed.ops.linearize_ids.linearize_ids`.
        offsets: ``[num_features * batch_size + 1]`` for jagged bags; else
        hotness: ids a bag for each feature, the same for every sample.
        per_id_weights: ``[L]``, floating; gets a gradient where it requires one.
        output_dtype: float32, float16 or bfloat16; the weight's where None.
        weight_form: form of the gradient of ``weight``.
        sink: called in backward with ``rows`` and their gradients; ``weight`` then gets none.
        known_map: the result of :func:`fixed_gradient_map` for bags of this form, which spares
            backward computing it.
        store: pools and stores the sums itself, for example in another rank's memory; the result is
            then zeros, whose gradient is that of the sums.

    Returns:
        ``[batch_size, num_features, D]``.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    fixed = hotness_of_bags(offsets, hotness)
    return _PooledLookup.apply(
        weight.contiguous(),
        rows.contiguous(),
        None if offsets is None else offsets.contiguous(),
        fixed,
        None if per_id_weights is None else per_id_weights.contiguous(),
        num_features,
        batch_size,
        pooling is Pooling.MEAN,
        weight.dtype if output_dtype is None else output_dtype,
        weight_form,
        sink,
        known_map,
        store,
    )


def fixed_gradient_map(
    rows: Tensor, *, hotness: Sequence[int], batch_size: int, pooling: Pooling
) -> tuple[Tensor, Tensor]:
    """Row of the gradient ``[batch_size * num_features, D]`` that belongs to each position of
    ``rows [L]``, int32 ``[L]``, and its factor, float32 ``[L]``, or ``[0]`` where all are 1.

    For bags of fixed ``hotness`` without weights. It depends on the form of the bags alone, not on
    the ids, so it can be kept from batch to batch.
    """
    mean = pooling is Pooling.MEAN
    fixed = list(hotness)
    return pooled_lookup_gradient_map_op(rows, None, fixed, None, len(fixed), batch_size, mean)
