"""Requirements of ``torchembed::initialize_rows`` on its arguments."""

import torch
from torch import Tensor

from torchembed.core import checks, contents
from torchembed.core.types import InitializerKind


def check_initialize_rows(
    weight: Tensor,
    state0: Tensor | None,
    state1: Tensor | None,
    rows: Tensor,
    ids: Tensor,
    tables: Tensor,
    num_new: Tensor | None,
    table_keys: Tensor,
    kinds: Tensor,
    parameters: Tensor,
    first_columns: Tensor | None,
    initial_state: float,
) -> None:
    checks.check_matrix("weight", weight)
    for name, state in (("state0", state0), ("state1", state1)):
        if state is None:
            continue
        checks.check_dtype(name, state, (torch.float32,), "call .float()")
        if state.shape not in (weight.shape, weight.shape[:1]):
            raise ValueError(
                f"{name} must have shape {tuple(weight.shape)} or {tuple(weight.shape[:1])}, an "
                f"element for each of weight or for each row, got {tuple(state.shape)}"
            )
        checks.check_contiguous(name, state)
    num_rows, num_tables = rows.numel(), table_keys.numel()
    for name, tensor, dtype, numel, meaning in (
        ("rows", rows, torch.int64, num_rows, ""),
        ("ids", ids, torch.int64, num_rows, "one for each row"),
        ("tables", tables, torch.int32, num_rows, "one for each row"),
        ("num_new", num_new, torch.int64, 1, "a scalar in a tensor"),
        ("table_keys", table_keys, torch.int64, num_tables, ""),
        ("kinds", kinds, torch.int32, num_tables, "one for each table"),
        ("first_columns", first_columns, torch.int64, num_tables, "one for each table"),
    ):
        if tensor is not None:
            checks.check_dtype(name, tensor, (dtype,), f"call .to({dtype})")
            checks.check_dim(name, tensor, 1)
            checks.check_numel(name, tensor, numel, meaning)
            checks.check_contiguous(name, tensor)
    checks.check_dtype("parameters", parameters, (torch.float32,), "call .float()")
    checks.check_shape("parameters", parameters, (num_tables, 2), "two for each table")
    checks.check_contiguous("parameters", parameters)
    checks.check_same_device(
        "weight",
        weight,
        state0=state0,
        state1=state1,
        rows=rows,
        ids=ids,
        tables=tables,
        num_new=num_new,
        table_keys=table_keys,
        kinds=kinds,
        parameters=parameters,
        first_columns=first_columns,
    )


def check_initialize_rows_contents(
    weight: Tensor,
    state0: Tensor | None,
    state1: Tensor | None,
    rows: Tensor,
    ids: Tensor,
    tables: Tensor,
    num_new: Tensor | None,
    table_keys: Tensor,
    kinds: Tensor,
    parameters: Tensor,
    first_columns: Tensor | None,
    initial_state: float,
) -> None:
    if num_new is not None:
        advice = "take it from the insertion that gave the rows"
        contents.check_in_range("num_new", num_new, 0, rows.numel() + 1, advice)
        rows, tables = rows[: int(num_new)], tables[: int(num_new)]
    advice = "take rows and tables from the insertion of their ids"
    contents.check_in_range("rows", rows, -1, weight.shape[0], advice)
    contents.check_in_range("tables", tables[rows >= 0], 0, table_keys.numel(), advice)
    contents.check_in_range("kinds", kinds, 0, len(InitializerKind), "see InitializerKind")
