"""The precision in which a recipe computes, and in which its ranks exchange vectors."""

import enum

import torch

from torchembed.sharding import WirePrecision


class Precision(enum.Enum):
    """Precision of pooled vectors, and of the dense part's matrix products under
    ``torch.autocast``, by its dtype. Weights, optimizer states and losses are float32 always."""

    FP32 = torch.float32
    BF16 = torch.bfloat16

    @property
    def autocast(self) -> torch.dtype | None:
        """The ``autocast`` argument of :class:`~torchembed.training.TrainPipeline`."""
        return None if self is Precision.FP32 else self.value

    def context(self, device: torch.device) -> torch.autocast:
        """The autocast context for evaluations."""
        return torch.autocast(device.type, self.autocast, enabled=self.autocast is not None)


class WireDtype(enum.Enum):
    """Dtype in which ranks send each other looked-up vectors, or their gradients: their own, 16
    bits, or e4m3 with a scale for each vector."""

    OWN = None
    BF16 = torch.bfloat16
    FP16 = torch.float16
    FP8 = torch.float8_e4m3fn


def wire_precision(forward: WireDtype, backward: WireDtype) -> WirePrecision:
    """The ``wire`` of ``shard_embeddings`` for vectors and their gradients."""
    return WirePrecision(forward=forward.value, backward=backward.value)
