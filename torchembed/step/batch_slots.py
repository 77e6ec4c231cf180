"""Static places on a device that batches are copied to, on a stream of their own."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from torchembed.core.trees import map_tensors, tensors_in
from torchembed.step.streams import event_on, wait_for


class BatchSlots:
    """Two batches' worth of memory on ``device``, filled in turn while the other one is used.

    Batches are trees of the layout of ``example``, but that tensors may be shorter; what is behind
    them stays as it is. From pinned host memory, and from a GPU, they are copied as they are;
    pageable ones go through pinned slots of ours.
    """

    def __init__(self, example: Any, device: torch.device) -> None:
        self.batches = [
            # Zeros, since steps prepare also what nothing has come to.
            map_tensors(lambda tensor: torch.zeros_like(tensor, device=device), example)
            for _ in range(2)
        ]
        self._tensors = [tensors_in(batch) for batch in self.batches]
        self._is_cuda = device.type == "cuda"
        self._stream = None
        if self._is_cuda:
            self._stream = torch.cuda.Stream(device)
            # The current stream may still use what was in this memory before.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._filled: list[torch.cuda.Event | None] = [None, None]
        self._used: list[torch.cuda.Event | None] = [None, None]
        self._pinned: list[dict[int, Tensor]] = [{}, {}]
        self._sources: list[Any] = [None, None]

    def fill(self, slot: int, batch: Any) -> None:
        """Begin to copy ``batch`` to ``slot``, once what was said to use it is done.

        Waits where the slot's pinned memory is still being copied from.
        """
        sources, targets = tensors_in(batch), self._tensors[slot]
        if self._stream is not None:
            if any(source.is_cuda for source in sources):
                self._stream.wait_stream(torch.cuda.current_stream())
            used = self._used[slot]
            if used is not None:
                self._stream.wait_event(used)
        # The stream's own context: torch.cuda.stream() takes 9 us of the host.
        with contextlib.nullcontext() if self._stream is None else self._stream:
            for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
                if self._is_cuda and not (source.is_cuda or source.is_pinned()):
                    source = self._pin(slot, number, source)
                if source.shape != target.shape:
                    target = target[: source.shape[0]]
                target.copy_(source, non_blocking=True)
        # Held until the slot is filled again: the copy may not have begun.
        self._sources[slot] = batch
        self._filled[slot] = event_on(self._stream)

    def _pin(self, slot: int, number: int, source: Tensor) -> Tensor:
        filled = self._filled[slot]
        if filled is not None:
            filled.synchronize()
        pinned = self._pinned[slot].get(number)
        if pinned is None:
            like = self._tensors[slot][number]
            pinned = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
            self._pinned[slot][number] = pinned
        if source.shape != pinned.shape:
            pinned = pinned[: source.shape[0]]
        return pinned.copy_(source)

    def wait_until_filled(self, slot: int) -> None:
        """Let the current stream wait for the copy to ``slot``."""
        wait_for(self._filled[slot])

    def note_use(self, slot: int) -> torch.cuda.Event | None:
        """What the current stream has got so far may read ``slot``; what comes once it is done."""
        done = event_on(torch.cuda.current_stream() if self._is_cuda else None)
        self._used[slot] = done
        return done
