"""Defines the operations on columns and picks their kernels."""

from torch import Tensor

from torchembed.core.dispatch import define_op
from torchembed.ops.columns.checks import check_join_columns, check_split_columns
from torchembed.ops.columns.reference import join_columns_reference, split_columns_reference


def _fake_join(
    parts: list[Tensor], targets: list[int], widths: list[int], num_columns: int
) -> Tensor:
    return parts[0].new_empty(parts[0].shape[0], num_columns)


def _fake_split(
    joined: Tensor, targets: list[int], widths: list[int], part_columns: list[int]
) -> list[Tensor]:
    return [joined.new_empty(joined.shape[0], columns) for columns in part_columns]


join_columns_op = define_op(
    "join_columns(Tensor[] parts, int[] targets, int[] widths, int num_columns) -> Tensor",
    reference=join_columns_reference,
    fake=_fake_join,
    triton="torchembed.triton_kernels.columns:launch_join_columns",
    check=check_join_columns,
)

split_columns_op = define_op(
    "split_columns(Tensor joined, int[] targets, int[] widths, int[] part_columns) -> Tensor[]",
    reference=split_columns_reference,
    fake=_fake_split,
    triton="torchembed.triton_kernels.columns:launch_split_columns",
    check=check_split_columns,
)
