"""The scale of gradients that are sent in float16."""

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.sharding.transport.finished_work import all_reduce


def float16_scale(gradients: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """The power of two, float32 ``[]``, that brings the largest of all ranks' float32 ``gradients``
    to ``[2**14, 2**15)``, and its inverse. Collective; the host waits for no GPU."""
    magnitudes = gradients.abs()
    # Infinities and NaN are sent as they are, and must not decide the scale of all others.
    finite = magnitudes.where(torch.isfinite(magnitudes), 0.0).flatten()
    # A rank without gradients has no maximum, so zero is added.
    largest = torch.cat([finite, finite.new_zeros(1)]).amax()
    all_reduce(largest, group, dist.ReduceOp.MAX)
    # The exponent's bits give the power of two exactly, without a logarithm's rounding.
    exponent = (largest.view(torch.int32) >> 23) - 127
    # Beyond 2**126 the inverse would not be a normal number.
    shift = (14 - exponent).clamp_max(126)
    scale, inverse = ((127 + power) << 23 for power in (shift, -shift))
    return scale.view(torch.float32), inverse.view(torch.float32)
