"""Defines ``torchembed::dense_update`` and picks its kernels."""

from torchembed.core.dispatch import define_op
from torchembed.core.update_records import DenseUpdate
from torchembed.ops.dense_update.checks import check_dense_update
from torchembed.ops.dense_update.reference import dense_update_reference


def _fake(update: DenseUpdate) -> None:
    return None


dense_update_op = define_op(
    "dense_update(Tensor(a!) weight, Tensor(b!)? state0, Tensor(c!)? state1,"
    " Tensor(d!)? rounded, Tensor grad, Tensor lr, Tensor? step, Tensor? grad_multiplier,"
    " Tensor? skip, int[] bounds, int optimizer, float eps, float beta1, float beta2,"
    " float weight_decay) -> ()",
    reference=dense_update_reference,
    fake=_fake,
    triton="torchembed.triton_kernels.dense_update:launch_dense_update",
    check=check_dense_update,
    record=DenseUpdate,
)
