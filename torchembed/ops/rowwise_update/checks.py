"""What ``torchembed::rowwise_update`` requires of its arguments."""

import torch
from torch import Tensor

from torchembed.core import checks, contents
from torchembed.core.types import RUN_CHUNK, OptimizerKind

_KINDS = frozenset(map(int, OptimizerKind))
_NUM_STATES = {int(OptimizerKind.SGD): 0, int(OptimizerKind.ADAM): 2}

_ONE_FOR_EACH_CHUNK = f"one for each {RUN_CHUNK} ids"


def _check_states(
    weight: Tensor, state0: Tensor | None, state1: Tensor | None, optimizer: int
) -> None:
    if optimizer not in _KINDS:
        raise ValueError(f"optimizer must be a value of OptimizerKind, got {optimizer}")
    num_states = _NUM_STATES.get(optimizer, 1)
    rowwise = optimizer == OptimizerKind.ROWWISE_ADAGRAD
    shape = weight.shape[:1] if rowwise else weight.shape
    for index, (name, state) in enumerate((("state0", state0), ("state1", state1))):
        if (state is not None) != (index < num_states):
            needed, came = ("given", "None") if state is None else ("None", "a tensor")
            kind = OptimizerKind(optimizer).name
            raise ValueError(f"{name} must be {needed} for {kind}, got {came}")
        if state is not None:
            checks.check_dtype(name, state, (torch.float32,), "call .float()")
            if state.shape != shape or not state.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous {tuple(shape)}, got {tuple(state.shape)}"
                )


def _check_runs(
    unique_rows: Tensor,
    starts: Tensor,
    order: Tensor,
    num_runs: Tensor,
    chunk_runs: Tensor,
    num_ids: int,
) -> None:
    checks.check_ids("unique_rows", unique_rows)
    runs = (
        ("unique_rows", unique_rows, num_ids, "one for each id"),
        ("starts", starts, num_ids + 1, "one for each id, and the end"),
        ("order", order, num_ids, "one for each id"),
        ("num_runs", num_runs, 1, "a scalar in a tensor"),
        ("chunk_runs", chunk_runs, num_ids // RUN_CHUNK, _ONE_FOR_EACH_CHUNK),
    )
    for name, tensor, numel, meaning in runs:
        if tensor is not unique_rows:
            checks.check_dtype(name, tensor, (torch.int32,), "take the runs from find_runs")
        checks.check_numel(name, tensor, numel, meaning)
        checks.check_contiguous(name, tensor)


def _check_gradients(
    grad: Tensor, gradient_rows: Tensor | None, scales: Tensor | None, num_ids: int, dim: int
) -> None:
    checks.check_matrix("grad", grad)
    if grad.shape[1] != dim:
        raise ValueError(f"grad must have {dim} columns, got {grad.shape[1]}")
    if gradient_rows is not None:
        checks.check_ids("gradient_rows", gradient_rows)
        checks.check_numel("gradient_rows", gradient_rows, num_ids, "one for each id")
        checks.check_contiguous("gradient_rows", gradient_rows)
    elif grad.shape[0] != num_ids:
        raise ValueError(f"grad must have {num_ids} rows (one for each id), got {grad.shape[0]}")
    if scales is not None:
        checks.check_dtype("scales", scales, (torch.float32,), "call .float()")
        checks.check_numel("scales", scales, num_ids, "one for each id")
        checks.check_contiguous("scales", scales)


def _check_rounding(
    row_offsets: Tensor | None,
    row_keys: Tensor | None,
    first_columns: Tensor | None,
) -> None:
    if (row_offsets is None) != (row_keys is None):
        raise ValueError("row_offsets and row_keys must be given together, got one of them")
    if row_offsets is None or row_keys is None:
        if first_columns is not None:
            raise ValueError("first_columns must be None without row_keys, got a tensor")
        return
    num_tables = row_offsets.numel() - 1
    if num_tables < 1:
        raise ValueError(
            "row_offsets must hold a number more than there are tables, so 2 or more, got "
            f"{row_offsets.numel()}"
        )
    for name, tensor in (
        ("row_offsets", row_offsets),
        ("row_keys", row_keys),
        ("first_columns", first_columns),
    ):
        if tensor is None:
            continue
        checks.check_dtype(name, tensor, (torch.int64,), "call .long()")
        if tensor is not row_offsets:
            checks.check_numel(name, tensor, num_tables, "one for each table")
        checks.check_contiguous(name, tensor)


def check_rowwise_update(
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
    *_: float,
) -> None:
    checks.check_float("weight", weight)
    checks.check_dim("weight", weight, 2)
    if not weight.is_contiguous():
        raise ValueError("weight must be contiguous, since it is updated in place; copy it first")
    num_ids = order.numel()
    _check_states(weight, state0, state1, optimizer)
    _check_runs(unique_rows, starts, order, num_runs, chunk_runs, num_ids)
    _check_gradients(grad, gradient_rows, scales, num_ids, weight.shape[1])
    scalars = {"lr": lr, "step": step, "grad_multiplier": grad_multiplier, "skip": skip}
    checks.check_scalars(**scalars)
    if step is None and (optimizer == OptimizerKind.ADAM or row_keys is not None):
        raise ValueError("step must be given for Adam and for stochastic rounding, got None")
    _check_rounding(row_offsets, row_keys, first_columns)
    checks.check_same_device(
        "weight",
        weight,
        state0=state0,
        state1=state1,
        unique_rows=unique_rows,
        starts=starts,
        order=order,
        num_runs=num_runs,
        chunk_runs=chunk_runs,
        grad=grad,
        gradient_rows=gradient_rows,
        scales=scales,
        **scalars,
        row_offsets=row_offsets,
        row_keys=row_keys,
        first_columns=first_columns,
    )


def check_rowwise_update_contents(
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
    *_: object,
) -> None:
    advice = "take the runs from find_runs"
    num_ids, count = order.numel(), int(num_runs)
    contents.check_in_range("num_runs", num_runs.reshape(1), 0, num_ids + 1, advice)
    contents.check_in_range("starts", starts[: count + 1], 0, num_ids + 1, advice)
    contents.check_ascending("starts", starts[: count + 1], advice)
    contents.check_in_range("order", order, 0, num_ids, advice)
    contents.check_in_range("unique_rows", unique_rows[:count], 0, weight.shape[0], advice)
    contents.check_ascending("unique_rows", unique_rows[:count], advice, distinct=True)
    contents.check_in_range("chunk_runs", chunk_runs, -1, max(count, 1), advice)
    if gradient_rows is not None and grad.shape[0]:
        contents.check_in_range(
            "gradient_rows", gradient_rows, 0, grad.shape[0], "they are rows of grad"
        )
