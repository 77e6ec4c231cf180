"""Requirements of ``torchembed::rowwise_update`` on its arguments."""

from typing import cast

import torch
from torch import Tensor

from torchembed.core import checks, contents
from torchembed.core.types import RUN_CHUNK, OptimizerKind
from torchembed.core.update_records import RowUpdate

_KINDS = frozenset(map(int, OptimizerKind))
_NUM_STATES = {int(OptimizerKind.SGD): 0, int(OptimizerKind.ADAM): 2}

_SCALARS = ("lr", "step", "grad_multiplier", "skip")
"""Names of the tensors that hold one number; they follow each other in the record."""
_FIRST_SCALAR = RowUpdate._fields.index(_SCALARS[0])
_NUM_TENSORS = RowUpdate._fields.index("optimizer")
_ONE_FOR_EACH_CHUNK = f"one for each {RUN_CHUNK} ids"


def _check_states(update: RowUpdate) -> None:
    weight, optimizer = update.weight, update.optimizer
    if optimizer not in _KINDS:
        raise ValueError(f"optimizer must be a value of OptimizerKind, got {optimizer}")
    num_states = _NUM_STATES.get(optimizer, 1)
    rowwise = optimizer == OptimizerKind.ROWWISE_ADAGRAD
    shape = weight.shape[:1] if rowwise else weight.shape
    states = (("state0", update.state0), ("state1", update.state1))
    for index, (name, state) in enumerate(states):
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


def _check_runs(update: RowUpdate, num_ids: int) -> None:
    checks.check_ids("unique_rows", update.unique_rows)
    runs = (
        ("unique_rows", update.unique_rows, num_ids, "one for each id"),
        ("starts", update.starts, num_ids + 1, "one for each id, and the end"),
        ("order", update.order, num_ids, "one for each id"),
        ("num_runs", update.num_runs, 1, "a scalar in a tensor"),
        ("chunk_runs", update.chunk_runs, num_ids // RUN_CHUNK, _ONE_FOR_EACH_CHUNK),
    )
    for name, tensor, numel, meaning in runs:
        if tensor.dtype is not torch.int32 and tensor is not update.unique_rows:
            checks.check_dtype(name, tensor, (torch.int32,), "take the runs from find_runs")
        if tensor.numel() != numel or not tensor.is_contiguous():
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


def check_rowwise_update(update: RowUpdate) -> None:
    # Each call of a check costs the host a tenth of a microsecond, and there are many tensors: of
    # those, only what fails calls one.
    weight = update.weight
    checks.check_float("weight", weight)
    checks.check_dim("weight", weight, 2)
    if not weight.is_contiguous():
        raise ValueError("weight must be contiguous, since it is updated in place; copy it first")
    num_ids = update.order.numel()
    _check_states(update)
    _check_runs(update, num_ids)
    _check_gradients(update.grad, update.gradient_rows, update.scales, num_ids, weight.shape[1])
    tensors = cast("tuple[Tensor | None, ...]", update[:_NUM_TENSORS])
    for name, scalar in zip(_SCALARS, tensors[_FIRST_SCALAR:], strict=False):
        if scalar is not None and (scalar.dtype is not torch.float32 or scalar.numel() != 1):
            checks.check_scalars(**{name: scalar})
    needs_step = update.optimizer == OptimizerKind.ADAM or update.row_keys is not None
    if update.step is None and needs_step:
        raise ValueError("step must be given for Adam and for stochastic rounding, got None")
    _check_rounding(update.row_offsets, update.row_keys, update.first_columns)
    device = weight.device
    for name, tensor in zip(RowUpdate._fields, tensors, strict=False):
        if tensor is not None and tensor.device != device:
            checks.check_same_device("weight", weight, **{name: tensor})


def check_rowwise_update_contents(update: RowUpdate) -> None:
    advice = "take the runs from find_runs"
    num_ids, count = update.order.numel(), int(update.num_runs)
    starts, rows = update.starts[: count + 1], update.unique_rows[:count]
    contents.check_in_range("num_runs", update.num_runs.reshape(1), 0, num_ids + 1, advice)
    contents.check_in_range("starts", starts, 0, num_ids + 1, advice)
    contents.check_ascending("starts", starts, advice)
    contents.check_in_range("order", update.order, 0, num_ids, advice)
    contents.check_in_range("unique_rows", rows, 0, update.weight.shape[0], advice)
    contents.check_ascending("unique_rows", rows, advice, distinct=True)
    contents.check_in_range("chunk_runs", update.chunk_runs, -1, max(count, 1), advice)
    num_gradients = update.grad.shape[0]
    if update.gradient_rows is not None and num_gradients:
        contents.check_in_range(
            "gradient_rows", update.gradient_rows, 0, num_gradients, "they are rows of grad"
        )
