"""The specification of ``rowwise_update`` in eager torch."""

import torch
from torch import Tensor

from torchembed.core.random_bits import random_bits
from torchembed.core.types import OptimizerKind
from torchembed.core.update_records import RowUpdate


def run_gradients(
    starts: Tensor,
    order: Tensor,
    grad: Tensor,
    gradient_rows: Tensor | None,
    scales: Tensor | None,
) -> Tensor:
    """The summed gradient of each run, float32 ``[L, D]``; zeros from ``num_runs`` on."""
    positions = order.long()
    terms = grad[positions if gradient_rows is None else gradient_rows.long()[positions]].float()
    if scales is not None:
        terms = terms * scales[positions].unsqueeze(1)
    # segment_reduce adds in one order on every device; index_add_ uses atomics on a GPU.
    return torch.segment_reduce(terms, "sum", offsets=starts, unsafe=True, initial=0)


def stochastic_round(value: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round float32 ``value`` to ``dtype`` up or down with probability proportional to nearness.

    ``bits`` holds an int64 for each element, whose upper 16 bits are random: all of them are used
    for bfloat16, their upper 13 for float16. Values that ``dtype`` holds exactly stay as they are.
    Infinities, NaN, and float16's overflow round as ``Tensor.to`` does.
    """
    nearest = value.to(dtype)
    if dtype == torch.bfloat16:
        noise = ((bits >> 48) & 0xFFFF).to(torch.int32)
        rounded = ((value.view(torch.int32) + noise) & ~0xFFFF).view(torch.float32)
        return torch.where(torch.isfinite(value), rounded, value).to(dtype)
    noise = (bits >> 51) & 0x1FFF
    normal = (value.view(torch.int32) + noise.to(torch.int32)) & ~0x1FFF
    # Below 2**-14 float16 is spaced evenly, by 2**-24; both products are exact.
    steps = torch.floor(value.abs() * 2.0**24 + noise.float() * 2.0**-13)
    subnormal = torch.copysign(steps * 2.0**-24, value)
    rounded = torch.where(value.abs() < 2.0**-14, subnormal, normal.view(torch.float32))
    fits = rounded.abs() <= torch.finfo(torch.float16).max
    return torch.where(fits & torch.isfinite(value), rounded.to(dtype), nearest)


def rounding_bits(
    rows: Tensor,
    dim: int,
    row_offsets: Tensor,
    row_keys: Tensor,
    first_columns: Tensor | None,
    step: Tensor,
) -> Tensor:
    """Random bits for each element of each of ``rows``, int64 ``[N, dim]``, of which the upper 16
    count. 64 are drawn for each group of four columns, the first of which is a multiple of four,
    and give 16 to each column, the upper ones to the first."""
    table = torch.searchsorted(row_offsets, rows.long(), right=True) - 1
    row_key = random_bits(row_keys[table], rows.long())
    step_key = random_bits(row_key, step.long())
    columns = torch.arange(dim, device=rows.device)
    if first_columns is not None:
        columns = columns + first_columns[table].unsqueeze(1)
    return random_bits(step_key.unsqueeze(1), columns >> 2) << 16 * (columns & 3)


def root(value: Tensor) -> Tensor:
    """The square root of float32 ``value``, rounded correctly as kernels' are: torch's own on a CPU
    may be off by a bit."""
    return value.double().sqrt().float()


def rowwise_update_reference(update: RowUpdate) -> None:
    weight, state0, state1, step = update.weight, update.state0, update.state1, update.step
    num_ids = update.order.numel()
    if num_ids == 0 or weight.numel() == 0 or update.grad.shape[0] == 0:
        return
    sums = run_gradients(
        update.starts, update.order, update.grad, update.gradient_rows, update.scales
    )
    # Shapes stay static: entries past the last run repeat it, and write the same values again.
    last_run = (update.num_runs.long() - 1).clamp_min(0)
    run = torch.arange(num_ids, device=weight.device).minimum(last_run)
    rows = update.unique_rows.long()[run].clamp_min(0)
    active = update.num_runs > 0
    if update.skip is not None:
        active = active & (update.skip == 0)

    gradient = sums[run]
    if update.grad_multiplier is not None:
        gradient = gradient * update.grad_multiplier
    if update.max_gradient > 0:
        gradient = gradient.clamp(-update.max_gradient, update.max_gradient)
    old = weight[rows].float()
    if update.weight_decay != 0:
        gradient = gradient + update.weight_decay * old

    def write(target: Tensor, updated: Tensor) -> None:
        target.index_copy_(0, rows, torch.where(active, updated, target[rows]))

    if update.optimizer == OptimizerKind.SGD:
        new = old - update.lr * gradient
    elif update.optimizer == OptimizerKind.ADAGRAD:
        assert state0 is not None
        total = state0[rows] + gradient * gradient
        write(state0, total)
        new = old - update.lr * (gradient / (root(total) + update.eps))
    elif update.optimizer == OptimizerKind.ROWWISE_ADAGRAD:
        assert state0 is not None
        total = state0[rows] + (gradient * gradient).mean(dim=1)
        write(state0, total)
        new = old - update.lr * (gradient / (root(total) + update.eps).unsqueeze(1))
    else:
        assert update.optimizer == OptimizerKind.ADAM
        assert state0 is not None and state1 is not None and step is not None
        mean = state0[rows] + (gradient - state0[rows]) * (1 - update.beta1)
        square = state1[rows] + (gradient * gradient - state1[rows]) * (1 - update.beta2)
        write(state0, mean)
        write(state1, square)
        # In float64, since powers of a beta near 1 lose their digits in float32.
        count = step.double()
        correction1, correction2 = 1 - update.beta1**count, 1 - update.beta2**count
        step_size = (update.lr.double() * correction2.sqrt() / correction1).float()
        new = old - step_size * (mean / (root(square) + update.eps))

    if update.row_keys is not None:
        assert update.row_offsets is not None and step is not None
        bits = rounding_bits(
            rows, weight.shape[1], update.row_offsets, update.row_keys, update.first_columns, step
        )
        rounded = stochastic_round(new, weight.dtype, bits)
    else:
        rounded = new.to(weight.dtype)
    write(weight, rounded)
