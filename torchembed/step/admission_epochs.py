"""The epochs of batches that tables admit: what keeps the rows of batches under way in place."""

import torch
from torch import Tensor

from torchembed.tables import Admission


class AdmissionEpochs:
    """Numbers the batches that are admitted to be trained, on the device and without waiting for
    it. One count serves all engines of a pipeline.

    Args:
        device: of the batches.
    """

    def __init__(self, device: torch.device) -> None:
        self._last = torch.zeros(1, dtype=torch.int64, device=device)

    def admission(self, is_trained: Tensor | None) -> Admission:
        """The next batch, in an epoch of its own where it is trained, else in the last one.

        Args:
            is_trained: bool ``[1]`` on the device; None for a batch that is trained in any case.
        """
        self._last.add_(1 if is_trained is None else is_trained)
        return Admission(is_trained, self._last.clone())
