"""Defines ``torchembed::sequence_lookup_forward`` and picks its kernels."""

import torch
from torch import Tensor

from torchembed import _native
from torchembed.core.dispatch import define_op
from torchembed.ops.sequence_lookup.checks import (
    check_sequence_lookup_forward,
    check_sequence_lookup_forward_contents,
)
from torchembed.ops.sequence_lookup.reference import sequence_lookup_forward_reference


def _fake(weight: Tensor, rows: Tensor, output_dtype: torch.dtype) -> Tensor:
    return weight.new_empty(rows.shape[0], weight.shape[1], dtype=output_dtype)


sequence_lookup_forward_op = define_op(
    "sequence_lookup_forward(Tensor weight, Tensor rows, ScalarType output_dtype) -> Tensor",
    reference=sequence_lookup_forward_reference,
    fake=_fake,
    triton="torchembed.triton_kernels.sequence_lookup:launch_sequence_lookup_forward",
    native=_native.native_op("sequence_lookup_forward"),
    check=check_sequence_lookup_forward,
    check_contents=check_sequence_lookup_forward_contents,
)
