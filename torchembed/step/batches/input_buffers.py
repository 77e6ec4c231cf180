"""Double-buffered memory on a device that batches are copied to, on a stream of its own."""

import contextlib

import torch
from torch import Tensor

from torchembed.core.trees import Tree, map_tensors, tensors_in
from torchembed.step.stages import ReadBatch
from torchembed.step.streams import event_on

_NOTHING = contextlib.nullcontext()


class InputBuffers:
    """Two buffers on ``device``, each of which takes a batch while the other one is used.

    Batches are trees of the layout of ``example``, but that tensors may be shorter; what lies
    behind them in the buffer stays as it is. From pinned host memory, and from a GPU, tensors are
    copied as they are; pageable ones go through pinned memory of the buffer's own. What is left of
    the last dimension of a padded part is filled with its value.

    Args:
        example: a batch.
        device: of the buffers.
        tracks_fresh: keep :attr:`is_fresh`.
        stream: where copies are made, a new one by default; None on a CPU.

    Attributes:
        batches: the contents of each buffer, zeros at first.
        is_fresh: of each buffer, bool ``[1]`` on the device: whether it holds a batch that no
            table has admitted yet. Kept where ``tracks_fresh`` says so, else None.
    """

    def __init__(
        self,
        example: Tree,
        device: torch.device,
        *,
        tracks_fresh: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.batches = [
            # Zeros, since steps prepare also a buffer that nothing was copied to.
            map_tensors(lambda tensor: torch.zeros_like(tensor, device=device), example)
            for _ in range(2)
        ]
        self.is_fresh: list[Tensor] | None = None
        if tracks_fresh:
            self.is_fresh = [torch.zeros(1, dtype=torch.bool, device=device) for _ in range(2)]
        self._tensors = [tensors_in(batch) for batch in self.batches]
        self._shapes = [tensor.shape for tensor in self._tensors[0]]
        self._is_cuda = device.type == "cuda"
        self._stream = None
        self._index = device.index
        """The number of the GPU."""
        if self._is_cuda:
            if self._index is None:
                self._index = torch.cuda.current_device()
            self._stream = torch.cuda.Stream(device) if stream is None else stream
            # The current stream may still use what was in this memory before.
            self._stream.wait_stream(self._current_stream())
        self._filled: list[torch.cuda.Event | None] = [None, None]
        self._used: list[torch.cuda.Event | None] = [None, None]
        self._pinned: list[dict[int, Tensor]] = [{}, {}]
        self._held: list[ReadBatch | None] = [None, None]
        """The batch of each buffer: the copy may not have begun."""

    def fill(self, batch: ReadBatch) -> None:
        """Begin to copy ``batch`` to its buffer, once what was noted to use the buffer is done.

        Nothing is done where that copy was begun before. Waits where the buffer's pinned memory is
        still being copied from.
        """
        buffer = batch.buffer
        held = self._held[buffer]
        if held is not None and held.number == batch.number:
            return
        sources, targets = tensors_in(batch.source), self._tensors[buffer]
        if self._stream is not None:
            # A batch on the GPU may still be computed by the current stream.
            if any(source.is_cuda for source in sources):
                self._stream.wait_stream(self._current_stream())
            # The step that read the buffer's last batch may not have ended.
            used = self._used[buffer]
            if used is not None:
                self._stream.wait_event(used)
        # The stream's own context: torch.cuda.stream() takes 9 us of the host.
        with _NOTHING if self._stream is None else self._stream:
            places = zip(sources, targets, self._shapes, strict=True)
            for number, (source, target, shape) in enumerate(places):
                value = None if batch.padded is None else batch.padded.values.get(number)
                if self._is_cuda and not (source.is_cuda or source.is_pinned()):
                    source = self._pin(buffer, number, source, value)
                if source.shape == shape:  # as all are as a rule
                    target.copy_(source, non_blocking=True)
                else:
                    _copy(source, target, value)
            # On the copy's stream, so that the mark is there exactly when the batch is.
            if self.is_fresh is not None:
                self.is_fresh[buffer].fill_(True)
        self._held[buffer] = batch
        self._filled[buffer] = event_on(self._stream)

    def _pin(self, buffer: int, number: int, source: Tensor, value: float | None) -> Tensor:
        # The host writes to pinned memory at once, so the copy from it must have ended. That was
        # two batches ago, and the host hardly ever waits.
        filled = self._filled[buffer]
        if filled is not None:
            filled.synchronize()
        pinned = self._pinned[buffer].get(number)
        if pinned is None:
            like = self._tensors[buffer][number]
            pinned = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
            self._pinned[buffer][number] = pinned
        return _copy(source, pinned, value)

    def hold_back(self, buffer: int) -> None:
        """Let no table admit the batch that the buffer holds now, or that is being copied there."""
        if self.is_fresh is not None:
            self.wait_until_filled(buffer)
            self.is_fresh[buffer].zero_()

    def wait_until_filled(self, buffer: int) -> None:
        """Let the current stream wait for the copy to the buffer."""
        filled = self._filled[buffer]
        if filled is not None:
            self._current_stream().wait_event(filled)

    def _current_stream(self) -> torch.cuda.Stream:
        # By its number: to find out which GPU is meant takes longer than all else.
        return torch.cuda.current_stream(self._index)

    def note_use(self, buffer: int) -> torch.cuda.Event | None:
        """Note that what the current stream holds may read the buffer.

        Returns:
            An event recorded once that is done; None on a CPU.
        """
        done = event_on(self._current_stream() if self._is_cuda else None)
        self._used[buffer] = done
        return done


def _copy(source: Tensor, target: Tensor, value: float | None) -> Tensor:
    """Copy ``source`` to the begin of ``target``, and fill the rest of its last dimension with
    ``value`` where that is given.

    Returns:
        The part of ``target`` that was written.
    """
    if source.shape == target.shape:
        return target.copy_(source, non_blocking=True)
    if value is None:
        return target[: source.shape[0]].copy_(source, non_blocking=True)
    length = source.shape[-1]
    target[..., :length].copy_(source, non_blocking=True)
    target[..., length:].fill_(value)
    return target
