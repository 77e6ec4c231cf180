"""Arrays that note what a dynamic table must hold of each id."""

import dataclasses
from collections import Counter as Counts

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

DIM = 2


@dataclasses.dataclass
class Held:
    """The contents of a table for each id of the universe ``[U]``; 0 where it has no row."""

    slots: Ints
    """-1 for none."""
    rows: Floats
    """``[U, DIM]``."""
    sums: Floats
    """``[U, DIM]``: the state of Adagrad; 0 under SGD."""
    touched: Ints
    scores: Ints

    @classmethod
    def none(cls, size: int) -> "Held":
        rows, sums = np.zeros((2, size, DIM), np.float32)
        slots, touched, scores = np.zeros((3, size), np.int64)
        return cls(slots - 1, rows, sums, touched, scores)

    @property
    def is_held(self) -> Bools:
        return self.slots >= 0

    def clear(self, which: Bools) -> None:
        """Take ids and all that is known of them away."""
        self.slots[which] = -1
        for state in (self.rows, self.sums, self.touched, self.scores):
            state[which] = 0

    def copy(self) -> "Held":
        return Held(*(getattr(self, field.name).copy() for field in dataclasses.fields(self)))

    def assert_equals(self, other: "Held") -> None:
        for field in dataclasses.fields(self):
            np.testing.assert_array_equal(
                getattr(self, field.name), getattr(other, field.name), field.name
            )


class ModelledTable:
    """The contents that one dynamic table must come to have.

    Args:
        initial: ``[U, DIM]``: the initial rows of the ids.
        missing: ``[U, DIM]``: what ids without a row are looked up as.
        threshold: occurrences at which an id gets a row.
    """

    def __init__(self, initial: Floats, missing: Floats, threshold: int) -> None:
        self.initial, self.missing, self.threshold = initial, missing, threshold
        self.held = Held.none(len(initial))
        self.waiting = np.zeros(len(initial), np.int64)
        """Occurrences of ids that have no row, since they had one."""
        self.copied = Held.none(len(initial))
        """Ids and rows as one holds them who follows deltas."""
        self.num_gone = 0
        """Ids that left since the mark, each as often as it did."""
        self.counts: Counts[str] = Counts()
        self.step_score: int | None = None
        """The score that batches give to their ids, where the caller gives scores."""

    def vectors(self, places: Ints) -> Floats:
        """The vectors of ids, by their places in the universe."""
        held = self.held
        return np.where(held.is_held[places, None], held.rows[places], self.missing[places])

    def move(self, now: Held) -> None:
        """Take note that ids lie in other rows, where they have any."""
        has_moved = self.held.is_held & now.is_held
        self.held.slots[has_moved] = now.slots[has_moved]

    def remove(self, which: Bools, reason: str, epoch: int) -> None:
        self.counts[reason] += int(which.sum())
        if reason != "erased":
            self.counts["evicted_age"] += int((epoch - self.held.touched[which]).sum())
        self.num_gone += int(which.sum())
        self.held.clear(which)
