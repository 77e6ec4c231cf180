"""Several epochs over a source, with a position that checkpoints can hold."""

from collections.abc import Iterator
from typing import Self

from torch.optim.optimizer import StateDict

from torchembed.data.batch import Batch
from torchembed.data.loader import BackgroundLoader
from torchembed.data.source import BatchSource, Portion


class Epochs:
    """This rank's batches of several epochs, for :func:`train` or :func:`in_step`.

    These two continue at the position, begin an epoch on every rank at the same step, and count the
    steps. So the position is the same on every rank, batches that were read ahead do not count, and
    a run on another number of ranks, or with another batch size, continues with exactly the rows
    that were not trained yet.

    Args:
        batches: a :class:`~torchembed.data.source.BatchSource`, or a ``BackgroundLoader`` over one.
        num_epochs: number of passes over the rows.
    """

    def __init__(self, batches: BackgroundLoader | BatchSource, num_epochs: int = 1) -> None:
        source = batches.source if isinstance(batches, BackgroundLoader) else batches
        if not isinstance(source, BatchSource):
            raise TypeError(
                f"batches must come from a BatchSource, got {type(source).__name__}; derive one, "
                "or pass the batches to train() themselves, without a position to go on from"
            )
        if num_epochs < 1:
            raise ValueError(f"num_epochs must be at least 1, got {num_epochs}")
        self.batches, self.num_epochs = batches, num_epochs
        self.epoch = 0
        """Index of the current epoch, from 0; ``num_epochs`` after the last."""
        self._read: list[Portion] = []
        self._ranks = (source.world_size, source.batch_size)
        self._running: Iterator[Batch] | None = None

    @property
    def is_done(self) -> bool:
        """True where every rank has gone through all epochs."""
        return self.epoch >= self.num_epochs

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Read this rank's next batch of the epoch."""
        if self.is_done:
            raise StopIteration
        if self._running is None:
            self._running = self.batches.begin(self._read)
        return next(self._running)

    def count_step(self) -> None:
        """Count a step of this epoch, which all ranks take."""
        if not self._read or self._read[-1][:2] != self._ranks:
            self._read.append(Portion(*self._ranks, 0))
        last = self._read[-1]
        self._read[-1] = last._replace(num_batches=last.num_batches + 1)

    def next_epoch(self) -> bool:
        """Begin the next epoch, once no rank has a batch left. Returns False after the last."""
        if not self.is_done:
            self.epoch, self._read, self._running = self.epoch + 1, [], None
        return not self.is_done

    def state_dict(self) -> StateDict:
        """The position; the same on every rank."""
        return {"epoch": self.epoch, "read": [list(portion) for portion in self._read]}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a position, from a run on any number of ranks."""
        self.epoch, self._running = state_dict["epoch"], None
        self._read = [Portion(*numbers) for numbers in state_dict["read"]]
