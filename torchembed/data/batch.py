"""One training batch."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures


class Batch(NamedTuple):
    """Samples of one step on one rank; a plain ``(dense, sparse, labels)`` tuple."""

    dense: Tensor
    """``[B, num_dense]``, float32."""
    sparse: SparseFeatures
    """Ids of every categorical feature, ``B`` samples."""
    labels: Tensor
    """``[B]``, float32, 0 or 1."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch on ``device``."""
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in self))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked host memory."""
        return Batch(*(part.pin_memory() for part in self))
