"""Requirements of the operations on rows in 8 bits on their arguments."""

import torch
from torch import Tensor

from torchembed.core import checks


def check_encode_rows(rows: Tensor) -> None:
    checks.check_matrix("rows", rows)
    if rows.shape[1] < 1:
        raise ValueError(f"rows must have at least one column, got shape {tuple(rows.shape)}")


def check_decode_rows(codes: Tensor, dtype: torch.dtype) -> None:
    checks.check_dtype("codes", codes, (torch.uint8,), "take them from encode_rows")
    checks.check_dim("codes", codes, 2)
    checks.check_contiguous("codes", codes)
    if codes.shape[1] < 2:
        raise ValueError(
            "codes must have a column of scales after at least one of elements, got shape "
            f"{tuple(codes.shape)}"
        )
    if dtype not in checks.FLOAT_DTYPES:
        raise TypeError(
            f"dtype must be float32, float16 or bfloat16, got {checks.dtype_name(dtype)}"
        )
