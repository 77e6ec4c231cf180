"""The precision in which vectors and gradients travel between ranks."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.core.checks import FLOAT_DTYPES
from torchembed.sharding.finished_work import all_reduce


@dataclasses.dataclass(frozen=True, kw_only=True)
class WirePrecision:
    """What looked-up vectors and their gradients are rounded to, to nearest, while they travel.

    Without a dtype, or with one no narrower than what is sent, they stay as they are. A vector is
    rounded once, also one that stays on its rank, so that results do not depend on where a sample
    or a row is; of a row-wise table, that is once for each rank's part of the sum. Sums are taken
    after the way back to the dtype that vectors had.

    In float16, vectors beyond 65504 become infinite; bfloat16 has no such bound. Gradients in
    float16 are multiplied by a power of two before and divided by it after: one for all ranks,
    found by reducing the largest finite magnitude, which it brings to between 2**14 and 2**15. So
    none overflows, and what is lost of one is at most 2**-11 of itself or 2**-39 of the largest,
    whichever is more; infinities and NaN arrive as such. A loss scaler is not needed for it.
    """

    forward: torch.dtype | None = None
    backward: torch.dtype | None = None
    dense: torch.dtype | None = None
    """In which the gradients of all other parameters are summed over ranks, float32 or bfloat16;
    may be wider than they are. Those of tables that every rank holds travel with them, in float32
    where it is None."""

    def __post_init__(self) -> None:
        if self.dense not in (None, torch.float32, torch.bfloat16):
            raise TypeError(
                f"dense of the wire must be float32, bfloat16 or None, got {self.dense}"
            )
        for name in ("forward", "backward"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in FLOAT_DTYPES:
                raise TypeError(
                    f"{name} of the wire must be float32, float16, bfloat16 or None, got {dtype}"
                )


def narrow_dtype(dtype: torch.dtype, wire: torch.dtype | None) -> torch.dtype:
    """``wire`` where that is narrower than ``dtype``, else ``dtype``."""
    return dtype if wire is None or wire.itemsize >= dtype.itemsize else wire


def narrowed(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``tensor`` in ``dtype`` where that is narrower."""
    return tensor.to(narrow_dtype(tensor.dtype, dtype))


def float16_scale(gradients: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """The power of two, float32 ``[]``, that brings the largest of all ranks' float32 ``gradients``
    to ``[2**14, 2**15)``, and its inverse. Never synchronizes; every rank of ``group`` calls it."""
    magnitudes = gradients.abs()
    finite = magnitudes.where(torch.isfinite(magnitudes), 0.0).flatten()
    largest = torch.cat([finite, finite.new_zeros(1)]).amax()
    all_reduce(largest, group, dist.ReduceOp.MAX)
    exponent = (largest.view(torch.int32) >> 23) - 127
    # Beyond 2**126 the inverse would not be a normal number.
    shift = (14 - exponent).clamp_max(126)
    scale, inverse = ((127 + power) << 23 for power in (shift, -shift))
    return scale.view(torch.float32), inverse.view(torch.float32)
