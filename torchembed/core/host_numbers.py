"""Asynchronous copies of integers from a device to the host."""

import torch
from torch import Tensor


class HostNumbers:
    """Copy of a tensor's integers to the host that has been started and may not be there yet.

    From a GPU they are copied to pinned memory without waiting. :meth:`tolist` waits for the copy,
    and lets other threads run meanwhile.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            shape, dtype = numbers.shape, numbers.dtype
            self._numbers = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            # A blocking event sleeps in place of spinning, so that the thread which launches steps
            # has the processor.
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record()

    @property
    def have_arrived(self) -> bool:
        """True once :meth:`tolist` no longer waits."""
        return self._arrived is None or self._arrived.query()

    def tolist(self) -> list:
        """The numbers, nested as the tensor's dimensions."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.tolist()
