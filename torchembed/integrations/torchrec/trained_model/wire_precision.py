"""Translates TorchRec's quantized communication to a wire precision."""

from collections.abc import Mapping

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.types import QuantizedCommCodecs

from torchembed.sharding.wire import WirePrecision

_DTYPES = {
    SparseType.FP32: None,
    SparseType.FP16: torch.float16,
    SparseType.BF16: torch.bfloat16,
    # FBGEMM's has a float32 scale for each row, and other 8-bit formats.
    SparseType.FP8: torch.float8_e4m3fn,
}


def wire_precision(registry: Mapping[str, QuantizedCommCodecs] | None) -> WirePrecision | str:
    """The precision that every codec of ``registry`` encodes vectors and gradients in, or, as a
    ``str``, the reason why there is no such precision."""
    found = set()
    for codecs in (registry or {}).values():
        precisions = [
            getattr(codec, "_comm_precision", None) for codec in (codecs.forward, codecs.backward)
        ]
        unknown = [p for p in precisions if p is not None and p not in _DTYPES]
        if unknown:
            return f"vectors that are sent as {unknown[0]}"
        forward, backward = (None if p is None else _DTYPES[p] for p in precisions)
        found.add(WirePrecision(forward=forward, backward=backward))
    if len(found) > 1:
        return "quantized communication of several kinds"
    return found.pop() if found else WirePrecision()
