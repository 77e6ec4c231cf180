"""Settings of what travels between ranks: its precision, its transport, the size of buckets."""

import dataclasses
import enum

import torch

from torchembed.core.checks import FLOAT_DTYPES

BUCKET_BYTES = 1 << 22
"""Gradients of dense parameters are reduced over ranks in buckets of about as many bytes."""


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


class WireTransport(enum.Enum):
    """How pooled vectors and their gradients travel, and dense gradients for their mean. Vectors
    and their gradients are the same, bit for bit; means may be summed in another order.

    ``COLLECTIVE``: by the process group's all-to-all, NCCL's on GPUs; anywhere.

    ``PUSH``: GPUs of one node store straight into each other's memory (NVLink, or PCIe with peer
    access), which spares copies and latency. Ids, and vectors that are not pooled, still travel by
    the process group.
    """

    COLLECTIVE = "collective"
    PUSH = "push"
