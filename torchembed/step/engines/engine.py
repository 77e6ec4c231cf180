"""The protocol of the engines that train batches."""

from collections.abc import Sequence
from typing import Protocol

from torchembed.step.stages import ReadBatch, Reason, TrainedBatch


class StepEngine(Protocol):
    """Trains the batches of one kind, in the order in which they were read.

    A pipeline shows an engine each batch of its kind as soon as it was read (:meth:`prefetch`), and
    then has it trained (:meth:`run`). Every rank calls both for the same batches in the same order.
    """

    @property
    def is_stale(self) -> bool:
        """True if the model or an optimizer changed in a way that the engine's steps do not follow;
        the pipeline then releases it and begins anew."""
        ...

    @property
    def is_captured(self) -> bool:
        """True if further steps are replays of captured ones."""
        ...

    def prefetch(self, batch: ReadBatch) -> None:
        """Begin what can be done for a batch before it is trained: copies, and what its ids alone
        decide. Nothing is done for a batch that was prefetched before."""
        ...

    def has_prepared(self, now: ReadBatch) -> bool:
        """True if the step before has prepared the batch, so that tables have admitted its ids; the
        same on all ranks."""
        ...

    def run(self, now: ReadBatch, upcoming: Sequence[ReadBatch]) -> TrainedBatch | Reason:
        """Train ``now``, and prepare the first of those that are ``upcoming``; none where that is
        empty, whatever batches were shown.

        What :meth:`prefetch` does is done now for those that the engine was not shown, since they
        were read before it was made or released.

        Returns:
            The reason where nothing was trained, since the engine cannot train the model; a warning
            has said it, and every other engine may be tried.

        Raises:
            IndexError, ValueError, TypeError: as the model's forward would.
        """
        ...

    def release(self) -> None:
        """Destroy graphs, end threads and forget all batches; a further step is a first one."""
        ...
