"""Defines ``torchembed::linearize_ids`` and picks its kernels."""

import torch
from torch import Tensor

from torchembed import _native
from torchembed.core.dispatch import define_op
from torchembed.ops.linearize_ids.checks import (
    check_linearize_ids,
    check_linearize_ids_contents,
    check_locate_bad_id,
)
from torchembed.ops.linearize_ids.reference import (
    linearize_ids_reference,
    locate_bad_id_reference,
)


def _fake(
    values: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    first_rows: Tensor,
    num_rows: Tensor,
    batch_size: int,
    on_bad_id: int,
    rows_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape, dtype=rows_dtype), values.new_empty(1, dtype=torch.int64)


linearize_ids_op = define_op(
    "linearize_ids(Tensor values, Tensor? offsets, int[] hotness, Tensor first_rows,"
    " Tensor num_rows, SymInt batch_size, int on_bad_id, ScalarType rows_dtype)"
    " -> (Tensor, Tensor)",
    reference=linearize_ids_reference,
    fake=_fake,
    triton="torchembed.triton_kernels.linearize_ids:launch_linearize_ids",
    native=_native.native_op("linearize_ids"),
    check=check_linearize_ids,
    check_contents=check_linearize_ids_contents,
)


def _fake_location(
    values: Tensor, first_bad: Tensor, bounds: Tensor | None, location: Tensor
) -> None:
    return None


locate_bad_id_op = define_op(
    "locate_bad_id(Tensor values, Tensor first_bad, Tensor? bounds, Tensor(a!) location) -> ()",
    reference=locate_bad_id_reference,
    fake=_fake_location,
    triton="torchembed.triton_kernels.linearize_ids:launch_locate_bad_id",
    check=check_locate_bad_id,
)
