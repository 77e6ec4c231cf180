"""The preparation of a batch that the step before has not prepared, as a graph of its own."""

from collections.abc import Callable, Sequence

from torchembed.sharding.transport.collectives import GatheredSize, recorded_sizes
from torchembed.step.batches.prefetch import Prefetch
from torchembed.step.engines.captured_call import CapturedCall

Capture = Callable[[Callable[[], None], Sequence[GatheredSize]], CapturedCall]
"""Captures a call in which the ranks exchange the given sizes."""


class CapturedPreparation:
    """Prepares the batch of one of two buffers where the step before had another layout.

    A captured step prepares the next batch of its own layout. Where layouts take turns that is of
    no use, and to launch the preparation operation by operation would take the host longer than all
    else in a step.

    Args:
        prefetch: prepares the batches.
        buffer: of the batch.
    """

    def __init__(self, prefetch: Prefetch, buffer: int) -> None:
        self._prefetch, self._buffer = prefetch, buffer
        self._sizes: list[GatheredSize] | None = None
        """The sizes that ranks exchanged when it was done without a graph last."""
        self._captured: CapturedCall | None = None

    @property
    def can_be_captured(self) -> bool:
        """True if it was done once where captured steps read it, and is not captured yet; the same
        on all ranks."""
        return self._captured is None and self._sizes is not None

    def capture(self, capture: Capture) -> None:
        """Capture it; waits for no other rank, whose capture may fail."""
        assert self._sizes is not None
        self._captured = capture(lambda: self._prepare(in_place=True), self._sizes)

    def __call__(self, *, in_place: bool) -> None:
        """Prepare the batch; collective.

        Args:
            in_place: as for :meth:`Prefetch.prepare`.
        """
        if self._captured is not None:
            self._captured.replay()
            return
        with recorded_sizes() as sizes:
            self._prepare(in_place=in_place)
        self._sizes = sizes if in_place else None

    def _prepare(self, *, in_place: bool) -> None:
        self._prefetch.prepare(self._buffer, in_place=in_place)

    def release(self) -> None:
        """Destroy the graph."""
        if self._captured is not None:
            self._captured.release()
        self._captured = self._sizes = None
