"""TorchRec's quantized communication in terms of our wires."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_embedding_configs import SparseType

_DTYPES = {SparseType.FP32: None, SparseType.FP16: torch.float16, SparseType.BF16: torch.bfloat16}


class Wire(NamedTuple):
    """What vectors and their gradients are rounded to while they travel; None for nothing."""

    forward: torch.dtype | None
    backward: torch.dtype | None


def wire_of(registry: Mapping[str, Any] | None) -> Wire | str:
    """The one for all that a codec ``registry`` says; where there is none, what it says."""
    found = set()
    for codecs in (registry or {}).values():
        precisions = [
            getattr(c, "_comm_precision", None) for c in (codecs.forward, codecs.backward)
        ]
        unknown = [p for p in precisions if p is not None and p not in _DTYPES]
        if unknown:
            return f"vectors that travel as {unknown[0]}"
        found.add(Wire(*(None if p is None else _DTYPES[p] for p in precisions)))
    if len(found) > 1:
        return "quantized communication of several kinds"
    return found.pop() if found else Wire(None, None)
