"""Requirements of ``torchembed::sequence_lookup_forward`` on its arguments."""

import torch
from torch import Tensor

from torchembed.core import checks, contents


def check_sequence_lookup_forward(weight: Tensor, rows: Tensor, output_dtype: torch.dtype) -> None:
    checks.check_matrix("weight", weight)
    checks.check_ids("rows", rows)
    checks.check_contiguous("rows", rows)
    checks.check_same_device("weight", weight, rows=rows)
    checks.check_output_dtype(output_dtype)


def check_sequence_lookup_forward_contents(
    weight: Tensor, rows: Tensor, output_dtype: torch.dtype
) -> None:
    contents.check_rows(rows, weight.shape[0])
