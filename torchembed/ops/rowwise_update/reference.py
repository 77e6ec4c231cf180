"""The specification of ``rowwise_update`` in eager torch."""

import torch
from torch import Tensor

from torchembed.core.random_bits import random_bits
from torchembed.core.types import OptimizerKind


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
    # One after the other on every device; index_add_ would on a GPU use atomics.
    return torch.segment_reduce(terms, "sum", offsets=starts, unsafe=True, initial=0)


def stochastic_round(value: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round float32 ``value`` to ``dtype`` up or down with probability proportional to nearness.

    ``bits`` holds 64 random bits for each element; their upper 16 are used for bfloat16, their
    upper 13 for float16. Values that ``dtype`` holds exactly stay as they are. Infinities, NaN, and
    float16's overflow round as ``Tensor.to`` does.
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
    """64 random bits for each element of each of ``rows``, int64 ``[N, dim]``."""
    table = torch.searchsorted(row_offsets, rows.long(), right=True) - 1
    row_key = random_bits(row_keys[table], rows.long())
    step_key = random_bits(row_key, step.long())
    columns = torch.arange(dim, device=rows.device)
    if first_columns is not None:
        columns = columns + first_columns[table].unsqueeze(1)
    return random_bits(step_key.unsqueeze(1), columns)


def root(value: Tensor) -> Tensor:
    """The square root of float32 ``value``, rounded correctly as kernels' are: torch's own on a CPU
    may be off by a bit."""
    return value.double().sqrt().float()


def rowwise_update_reference(
    weight: Tensor,
    state0: Tensor | None,
    state1: Tensor | None,
    unique_rows: Tensor,
    starts: Tensor,
    order: Tensor,
    num_runs: Tensor,
    chunk_runs: Tensor,
    grad: Tensor,
    gradient_rows: Tensor | None,
    scales: Tensor | None,
    lr: Tensor,
    step: Tensor | None,
    grad_multiplier: Tensor | None,
    skip: Tensor | None,
    row_offsets: Tensor | None,
    row_keys: Tensor | None,
    first_columns: Tensor | None,
    optimizer: int,
    eps: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    max_gradient: float,
) -> None:
    num_ids = order.numel()
    if num_ids == 0 or weight.numel() == 0 or grad.shape[0] == 0:
        return
    sums = run_gradients(starts, order, grad, gradient_rows, scales)
    # Shapes stay static: slots past the last run repeat it, and write the same values again.
    slot = torch.arange(num_ids, device=weight.device).minimum((num_runs.long() - 1).clamp_min(0))
    rows = unique_rows.long()[slot].clamp_min(0)
    active = num_runs > 0
    if skip is not None:
        active = active & (skip == 0)

    gradient = sums[slot]
    if grad_multiplier is not None:
        gradient = gradient * grad_multiplier
    if max_gradient > 0:
        gradient = gradient.clamp(-max_gradient, max_gradient)
    old = weight[rows].float()
    if weight_decay != 0:
        gradient = gradient + weight_decay * old

    def write(target: Tensor, updated: Tensor) -> None:
        target.index_copy_(0, rows, torch.where(active, updated, target[rows]))

    if optimizer == OptimizerKind.SGD:
        new = old - lr * gradient
    elif optimizer == OptimizerKind.ADAGRAD:
        assert state0 is not None
        total = state0[rows] + gradient * gradient
        write(state0, total)
        new = old - lr * (gradient / (root(total) + eps))
    elif optimizer == OptimizerKind.ROWWISE_ADAGRAD:
        assert state0 is not None
        total = state0[rows] + (gradient * gradient).mean(dim=1)
        write(state0, total)
        new = old - lr * (gradient / (root(total) + eps).unsqueeze(1))
    else:
        assert optimizer == OptimizerKind.ADAM
        assert state0 is not None and state1 is not None and step is not None
        mean = state0[rows] + (gradient - state0[rows]) * (1 - beta1)
        square = state1[rows] + (gradient * gradient - state1[rows]) * (1 - beta2)
        write(state0, mean)
        write(state1, square)
        count = step.double()
        correction1, correction2 = 1 - beta1**count, 1 - beta2**count
        step_size = (lr.double() * correction2.sqrt() / correction1).float()
        new = old - step_size * (mean / (root(square) + eps))

    if row_keys is not None:
        assert row_offsets is not None and step is not None
        bits = rounding_bits(rows, weight.shape[1], row_offsets, row_keys, first_columns, step)
        rounded = stochastic_round(new, weight.dtype, bits)
    else:
        rounded = new.to(weight.dtype)
    write(weight, rounded)
