"""Memory in which lookups of a GPU count what they have done."""

import threading

import torch
from torch import Tensor

_NUM_AT_ONCE = 256


class LookupProgress:
    """A zero of its own for each lookup that may be under way at once.

    Lookups of one stream follow one another, and so may have the same; each one that is captured in
    a CUDA graph has its own, since a graph may be replayed on any stream.

    Args:
        device: of all of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zeros = torch.zeros(_NUM_AT_ONCE, dtype=torch.int64, device=device)
        self._num_taken = 0
        self._of_streams: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def take(self) -> Tensor:
        """The zero of a lookup on the current stream: int64 ``[1]``."""
        if self._device.type != "cuda":
            return self._zeros[:1]
        stream = torch.cuda.current_stream(self._device).cuda_stream
        is_captured = torch.cuda.is_current_stream_capturing()
        with self._lock:
            found = None if is_captured else self._of_streams.get(stream)
            if found is None:
                found = self._new()
            if not is_captured:
                self._of_streams[stream] = found
            return found

    def _new(self) -> Tensor:
        if self._num_taken == _NUM_AT_ONCE:
            return torch.zeros(1, dtype=torch.int64, device=self._device)
        self._num_taken += 1
        return self._zeros[self._num_taken - 1 : self._num_taken]
