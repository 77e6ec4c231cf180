"""Settings of exchanges between ranks: precision, transport, and the size of buckets."""

import dataclasses
import enum

import torch

from torchembed.core.checks import FLOAT_DTYPES

BUCKET_BYTES = 1 << 22
"""Size of the buckets in which gradients of dense parameters are reduced over ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WirePrecision:
    """The precision in which vectors, and gradients, are sent between ranks, rounded to nearest.

    Without a dtype, or with one that is not narrower than their own, they are sent unchanged. Every
    vector is rounded once, even if it stays on its rank, so that results do not depend on the rank
    of a sample or a row; for a row-wise table each rank's part of the sum is rounded. Sums are
    taken in the vectors' own dtype, after the exchange.

    In float16, vectors beyond 65504 become infinite; bfloat16 has no such bound. Gradients in
    float16 are multiplied by a power of two before and divided by it after: one for all ranks,
    found by reducing the largest finite magnitude, which is scaled to between 2**14 and 2**15. So
    none overflows, and a gradient loses at most 2**-11 of itself or 2**-39 of the largest,
    whichever is more; infinities and NaN are preserved. No loss scaler is needed.

    In float8_e4m3fn each vector, or gradient of one, is sent with a scale of its own, a power of
    two in one byte; :func:`~torchembed.ops.row_codec.encode_rows` says what is lost. The part of a
    vector that a rank holds of a table divided by columns counts as a vector. Not for
    ``WireTransport.PUSH``.
    """

    forward: torch.dtype | None = None
    """Dtype of looked-up vectors: float32, float16, bfloat16, float8_e4m3fn, or None for their
    own."""
    backward: torch.dtype | None = None
    """Dtype of their gradients, likewise."""
    dense: torch.dtype | None = None
    """Dtype in which the gradients of all other parameters are summed over ranks, float32 or
    bfloat16; may be wider than theirs. Gradients of tables that every rank holds are reduced with
    them, in float32 where it is None."""

    def __post_init__(self) -> None:
        if self.dense not in (None, torch.float32, torch.bfloat16):
            raise TypeError(
                f"dense of the wire must be float32, bfloat16 or None, got {self.dense}"
            )
        for name in ("forward", "backward"):
            dtype = getattr(self, name)
            if dtype not in (None, *FLOAT_DTYPES, torch.float8_e4m3fn):
                raise TypeError(
                    f"{name} of the wire must be float32, float16, bfloat16, float8_e4m3fn or "
                    f"None, got {dtype}"
                )


class WireTransport(enum.Enum):
    """Transport of pooled vectors and their gradients, and of the mean of dense gradients.

    Vectors and their gradients have the same bits under each; means may be summed in another order.

    ``COLLECTIVE``: all-to-all and all-reduce of the process group, NCCL's on GPUs; anywhere.

    ``PUSH``: GPUs of one node store straight into each other's memory (NVLink, or PCIe with peer
    access), which saves copies and latency. Ids, and vectors that are not pooled, are still
    exchanged by the process group.
    """

    COLLECTIVE = "collective"
    PUSH = "push"


def check_wire(wire: WirePrecision, transport: WireTransport) -> None:
    """Raise ``ValueError`` where ``transport`` cannot send in the precision of ``wire``."""
    if transport is not WireTransport.PUSH:
        return
    for name in ("forward", "backward"):
        if getattr(wire, name) is torch.float8_e4m3fn:
            raise ValueError(
                f"{name} of the wire must be float32, float16, bfloat16 or None under "
                f"{transport}, got torch.float8_e4m3fn; use WireTransport.COLLECTIVE"
            )


def vector_bytes(width: int, dtype: torch.dtype, wire: torch.dtype | None) -> int:
    """Bytes of a sent vector of ``width`` elements of ``dtype``, in the precision ``wire``."""
    sent = narrow_dtype(dtype, wire)
    return width * sent.itemsize + (sent is torch.float8_e4m3fn)


def narrow_dtype(dtype: torch.dtype, wire: torch.dtype | None) -> torch.dtype:
    """``wire`` where that is narrower than ``dtype``, else ``dtype``."""
    return dtype if wire is None or wire.itemsize >= dtype.itemsize else wire
