"""Requirements of ``torchembed::initialize_rows`` on its arguments."""

import torch

from torchembed.core import checks, contents
from torchembed.core.types import InitializerKind
from torchembed.core.update_records import RowInitialization


def check_initialize_rows(new: RowInitialization) -> None:
    weight = new.weight
    checks.check_float("weight", weight)
    checks.check_dim("weight", weight, 2)
    checks.check_apart_rows("weight", weight)
    for name, state in (("state0", new.state0), ("state1", new.state1)):
        if state is None:
            continue
        checks.check_dtype(name, state, (torch.float32,), "call .float()")
        if state.shape not in (weight.shape, weight.shape[:1]):
            raise ValueError(
                f"{name} must have shape {tuple(weight.shape)} or {tuple(weight.shape[:1])}, an "
                f"element for each of weight or for each row, got {tuple(state.shape)}"
            )
        checks.check_apart_rows(name, state)
    num_rows, num_tables = new.rows.numel(), new.table_keys.numel()
    for name, tensor, dtype, numel, meaning in (
        ("rows", new.rows, torch.int64, num_rows, ""),
        ("ids", new.ids, torch.int64, num_rows, "one for each row"),
        ("tables", new.tables, torch.int32, num_rows, "one for each row"),
        ("num_new", new.num_new, torch.int64, 1, "a scalar in a tensor"),
        ("table_keys", new.table_keys, torch.int64, num_tables, ""),
        ("kinds", new.kinds, torch.int32, num_tables, "one for each table"),
        ("first_columns", new.first_columns, torch.int64, num_tables, "one for each table"),
    ):
        if tensor is not None:
            checks.check_dtype(name, tensor, (dtype,), f"call .to({dtype})")
            checks.check_dim(name, tensor, 1)
            checks.check_numel(name, tensor, numel, meaning)
            checks.check_contiguous(name, tensor)
    checks.check_dtype("parameters", new.parameters, (torch.float32,), "call .float()")
    checks.check_shape("parameters", new.parameters, (num_tables, 2), "two for each table")
    checks.check_contiguous("parameters", new.parameters)
    for name, tensor in (("weight", weight), ("state0", new.state0), ("state1", new.state1)):
        if tensor is not None:
            checks.check_reachable(name, tensor, "rows", new.rows)
    checks.check_same_device(
        "rows",
        new.rows,
        ids=new.ids,
        tables=new.tables,
        num_new=new.num_new,
        table_keys=new.table_keys,
        kinds=new.kinds,
        parameters=new.parameters,
        first_columns=new.first_columns,
    )


def check_initialize_rows_contents(new: RowInitialization) -> None:
    used_rows, used_tables = new.rows, new.tables
    if new.num_new is not None:
        advice = "take it from the insertion that gave the rows"
        contents.check_in_range("num_new", new.num_new, 0, new.rows.numel() + 1, advice)
        used_rows, used_tables = used_rows[: int(new.num_new)], used_tables[: int(new.num_new)]
    advice = "take rows and tables from the insertion of their ids"
    contents.check_in_range("rows", used_rows, -1, new.weight.shape[0], advice)
    contents.check_in_range(
        "tables", used_tables[used_rows >= 0], 0, new.table_keys.numel(), advice
    )
    contents.check_in_range("kinds", new.kinds, 0, len(InitializerKind), "see InitializerKind")
