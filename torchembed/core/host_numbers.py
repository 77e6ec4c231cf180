"""Integers that a device knows and the host needs."""

from typing import Any

import torch
from torch import Tensor


class HostNumbers:
    """Integers of a tensor on their way to the host.

    On a GPU they are copied to pinned memory without waiting; :meth:`tolist` waits, for what the
    current stream had got until then, and lets other threads run meanwhile.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._arrived: Any = None
        if numbers.is_cuda:
            shape, dtype = numbers.shape, numbers.dtype
            self._numbers = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            # One that blocks leaves the processor to the thread that launches steps.
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record()

    def tolist(self) -> list[Any]:
        """The numbers, nested as the tensor's dimensions."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.tolist()
