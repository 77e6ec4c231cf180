"""The layouts of captured steps: which kinds of step can train a batch, agreed over all ranks."""

import functools
from collections.abc import Callable, Hashable, Mapping

from torch import nn

from torchembed.core import ranks
from torchembed.core.trees import Tree, layout_of
from torchembed.modules.staged_collection import StagedCollection
from torchembed.step.batches.batch_layout import (
    has_fixed_shape,
    jagged_layout,
    lengths_digest,
    num_ids_in,
    only_moves,
)
from torchembed.step.batches.layout_reasons import part_layouts, reason_of_layout
from torchembed.step.stages import NO_KIND, Agreement, BatchKinds, Reason

_FIRST_RUN = 2
"""So many batches of one other layout in a row show that the first batch was the odd one."""
_DOES_MORE = Reason(
    "its method to does more than move tensors, which captured steps would leave out", "batch"
)
_TAKES_OVER = Reason("this layout came several times in a row; steps are captured for it next")


class KindLayout:
    """The layout of captured steps of one kind: that of the first batch, until another layout comes
    several times in a row and takes over.

    The number of batches that it takes is 2 the first time, and twice as many each time after that:
    captures, which take seconds, stay rare however layouts change.

    Attributes:
        layout: None before the first batch.
        digest: what :func:`~torchembed.step.batches.batch_layout.lengths_digest` gives for batches
            of the layout.
        parts: the layout of each part of the batch, by its path; for reasons.
    """

    def __init__(self) -> None:
        self.layout: Hashable = None
        self.digest = 0
        self.parts: Mapping[str, Hashable] | None = None
        self._rival: Hashable = None
        self._num_in_a_row = 0
        self._needed = _FIRST_RUN

    def takes_over(self, layout: Hashable, batch: Tree) -> bool:
        """Note the layout of ``batch``; True where it becomes that of captured steps in place of
        another one."""
        if layout is None or layout == self.layout:
            self._rival = None
            return False
        if self.layout is None:
            self._set(layout, batch)
            return False
        self._num_in_a_row = self._num_in_a_row + 1 if layout == self._rival else 1
        self._rival = layout
        if self._num_in_a_row < self._needed:
            return False
        self._needed *= 2
        self._set(layout, batch)
        return True

    def _set(self, layout: Hashable, batch: Tree) -> None:
        self.layout, self.digest, self.parts = layout, lengths_digest(batch), part_layouts(batch)


class Layouts:
    """The layouts of captured steps, of one rank.

    Where a layout takes over on one rank, all ranks have their engines begin anew, before the same
    step: :attr:`since` travels with the agreement on each batch. Until that is done no kind of step
    can train this rank's batches, since engines still have the old layout.

    Attributes:
        since: the number of the batch whose layout took over last; the same batch has it on all
            ranks.
        begun: ``since`` of all ranks when engines last began anew; whoever has them do it sets it.
    """

    def __init__(self, model: nn.Module) -> None:
        collections = [m for m in model.modules() if isinstance(m, StagedCollection)]
        self._all_wait = any(collection.always_waits_for_sizes for collection in collections)
        self._static, self._jagged = KindLayout(), KindLayout()
        self.since = self.begun = 0
        self._moved: dict[type, bool] = {}
        """For each class of batches, True if its own ``to`` does nothing but move them."""

    def kinds_of(self, batch: Tree, number: int) -> BatchKinds:
        """The kinds of ``batch``, which may set the layout of its kind.

        Args:
            number: number of batches that were read before it, the same on all ranks.
        """
        layout, is_static = self._static.layout, True
        if layout is None or layout_of(batch) != layout:
            is_static = self._is_static(batch)
            layout = layout_of(batch) if is_static else jagged_layout(batch)
            layout = layout if self._only_moves(batch) else None
        of_kind = self._static if is_static else self._jagged
        if of_kind.takes_over(layout, batch):
            self.since = number
        if layout is None or layout != of_kind.layout or self.begun < self.since:
            return NO_KIND
        return BatchKinds(static=is_static, jagged=not is_static)

    def _only_moves(self, batch: Tree) -> bool:
        kind = type(batch)
        if kind not in self._moved:
            self._moved[kind] = only_moves(batch)
        return self._moved[kind]

    def begin_anew(self, number: int) -> None:
        """Have engines begin anew on all ranks, before the step on the batch of ``number``."""
        self.since = number

    def _is_static(self, batch: Tree) -> bool:
        return has_fixed_shape(batch) and not self._all_wait

    def why_eager(self, batch: Tree) -> Reason:
        """The reason why ``batch`` is of none of the kinds of captured steps."""
        of_kind = self._static if self._is_static(batch) else self._jagged
        if not self._only_moves(batch):
            return _DOES_MORE
        reason = reason_of_layout(batch, of_kind.parts)
        return _TAKES_OVER if reason is None else reason

    def start_agreement(self, batch: Tree, kinds: BatchKinds) -> Callable[[], Agreement]:
        """Start to find out whether every rank's batch, of which ``batch`` is this rank's, is of
        ``kinds``; every rank must call it.

        Returns:
            A function that waits for the result and returns it, in any thread.
        """
        num_ids = num_ids_in(batch) if kinds.jagged else 0
        if ranks.world_size() == 1:
            agreement = Agreement(kinds, num_ids, self.since)
            return lambda: agreement
        digest = (self._static if kinds.static else self._jagged).digest
        # One collective for all six numbers. The maximum of a number is the minimum of its
        # negative, and digests are all equal where minimum and maximum are.
        numbers = *kinds, -num_ids, digest, -digest, -self.since
        return functools.partial(_agreement, ranks.start_minimum(*numbers))


def _agreement(least: Callable[[], tuple[int, ...]]) -> Agreement:
    """The agreement of all ranks, from the minimum over ranks of each of their numbers."""
    static, jagged, negated_num_ids, digest, negated_digest, negated_since = least()
    # Captured steps exchange ids as if every rank's features had one hotness and kind of weights.
    is_alike = digest == -negated_digest
    kinds = BatchKinds(static=bool(static) and is_alike, jagged=bool(jagged) and is_alike)
    return Agreement(kinds, -negated_num_ids, -negated_since)
