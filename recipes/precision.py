"""The precision in which a recipe computes."""

import enum

import torch


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
