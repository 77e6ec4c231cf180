"""Defines the operations on rows in 8 bits and picks their kernels."""

import torch
from torch import Tensor

from torchembed.core.dispatch import define_op
from torchembed.ops.row_codec.checks import check_decode_rows, check_encode_rows
from torchembed.ops.row_codec.reference import (
    decode_rows_reference,
    encode_rows_reference,
    scaled_rows_reference,
)


def _fake_encoded(rows: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], rows.shape[1] + 1, dtype=torch.uint8)


def _fake_scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    elements = rows.new_empty(rows.shape, dtype=torch.float8_e4m3fn)
    return elements, rows.new_empty(rows.shape[0], 1, dtype=torch.float32)


def _fake_decoded(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape[0], codes.shape[1] - 1, dtype=dtype)


encode_rows_op = define_op(
    "encode_rows(Tensor rows) -> Tensor",
    reference=encode_rows_reference,
    fake=_fake_encoded,
    triton="torchembed.triton_kernels.row_codec:launch_encode_rows",
    check=check_encode_rows,
)

decode_rows_op = define_op(
    "decode_rows(Tensor codes, ScalarType dtype) -> Tensor",
    reference=decode_rows_reference,
    fake=_fake_decoded,
    triton="torchembed.triton_kernels.row_codec:launch_decode_rows",
    check=check_decode_rows,
)

scaled_rows_op = define_op(
    "scaled_rows(Tensor rows) -> (Tensor, Tensor)",
    reference=scaled_rows_reference,
    fake=_fake_scaled,
    triton="torchembed.triton_kernels.row_codec:launch_scaled_rows",
    check=check_encode_rows,
)
