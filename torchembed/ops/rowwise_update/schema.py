"""Defines ``torchembed::rowwise_update`` and picks its kernels."""

from torchembed import _native
from torchembed.core.dispatch import define_op
from torchembed.core.update_records import RowUpdate
from torchembed.ops.rowwise_update.checks import (
    check_rowwise_update,
    check_rowwise_update_contents,
)
from torchembed.ops.rowwise_update.cuda import cuda_kernel
from torchembed.ops.rowwise_update.reference import rowwise_update_reference


def _fake(update: RowUpdate) -> None:
    return None


rowwise_update_op = define_op(
    "rowwise_update(Tensor(a!) weight, Tensor(b!)? state0, Tensor(c!)? state1,"
    " Tensor unique_rows, Tensor starts, Tensor order, Tensor num_runs, Tensor chunk_runs,"
    " Tensor grad, Tensor? gradient_rows, Tensor? scales,"
    " Tensor lr, Tensor? step, Tensor? grad_multiplier, Tensor? skip,"
    " Tensor? row_offsets, Tensor? row_keys, Tensor? first_columns,"
    " int optimizer, float eps, float beta1, float beta2, float weight_decay,"
    " float max_gradient) -> ()",
    reference=rowwise_update_reference,
    fake=_fake,
    triton="torchembed.triton_kernels.rowwise_update:launch_rowwise_update",
    cuda=cuda_kernel(),
    native=_native.native_op("rowwise_update"),
    check=check_rowwise_update,
    check_contents=check_rowwise_update_contents,
    record=RowUpdate,
)
