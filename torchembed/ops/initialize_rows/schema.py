"""Defines ``torchembed::initialize_rows`` and picks its kernels."""

from torchembed import _native
from torchembed.core.dispatch import define_op
from torchembed.core.update_records import RowInitialization
from torchembed.ops.initialize_rows.checks import (
    check_initialize_rows,
    check_initialize_rows_contents,
)
from torchembed.ops.initialize_rows.reference import initialize_rows_reference


def _fake(new: RowInitialization) -> None:
    return None


initialize_rows_op = define_op(
    "initialize_rows(Tensor(a!) weight, Tensor(b!)? state0, Tensor(c!)? state1,"
    " Tensor rows, Tensor ids, Tensor tables, Tensor? num_new,"
    " Tensor table_keys, Tensor kinds, Tensor parameters, Tensor? first_columns,"
    " float initial_state) -> ()",
    reference=initialize_rows_reference,
    fake=_fake,
    triton="torchembed.triton_kernels.initialize_rows:launch_initialize_rows",
    native=_native.native_op("initialize_rows"),
    check=check_initialize_rows,
    check_contents=check_initialize_rows_contents,
    record=RowInitialization,
)
