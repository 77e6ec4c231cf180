"""The layouts of captured steps: which kinds of step can train a batch, agreed over all ranks."""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

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

_MAX_SEEN = 256
"""The most layouts without a place whose batches are counted."""
_LARGER = 2**62
"""More than any number of a layout."""
_DOES_MORE = Reason(
    "its method to does more than move tensors, which captured steps would leave out", "batch"
)
_TAKES_OVER = Reason("steps are captured for this layout next")


class KnownLayout(NamedTuple):
    """A layout that has a place.

    Attributes:
        number: counts the layouts that had places so far, from 1.
        digest: what :func:`~torchembed.step.batches.batch_layout.lengths_digest` gives for batches
            of the layout.
        parts: the layout of each part of the batch, by its path; for reasons.
    """

    number: int
    digest: int
    parts: Mapping[str, Hashable]


class KindLayouts:
    """The layouts of captured steps of one kind: the first batch's, and each that has come twice
    while there are places.

    Where all places are taken, and twice as many batches as there are places come in succession
    without one, the layout that came twice takes over: all others lose their places. That takes
    twice as many batches each time after the first: captures, which take seconds, stay rare however
    layouts change.

    Attributes:
        most: number of places.
    """

    def __init__(self, most: int) -> None:
        self.most, self._needed = most, 2 * most
        self._known: dict[Hashable, KnownLayout] = {}
        self._num_known = self._num_others = 0
        """Layouts that had places so far; batches in succession that had none."""
        self._seen: dict[Hashable, int] = {}
        """Number of batches of each layout that has no place."""

    @property
    def are_full(self) -> bool:
        """True if all places are taken."""
        return len(self._known) == self.most

    def known(self, layout: Hashable) -> KnownLayout | None:
        """The place of ``layout``, None where it has none."""
        return self._known.get(layout)

    def placed(self, layout: Hashable) -> KnownLayout | None:
        """The place of ``layout``, None where it has none; notes a batch that has one."""
        known = self._known.get(layout)
        if known is not None:
            self._num_others = 0
        return known

    def numbered(self, number: int) -> KnownLayout | None:
        """The layout of ``number``, None where it has no place any more."""
        return next((known for known in self._known.values() if known.number == number), None)

    def last(self) -> KnownLayout | None:
        """The layout that was given a place last."""
        return next(reversed(self._known.values()), None)

    def takes_over(self, layout: Hashable, batch: Tree) -> bool:
        """Note the layout of ``batch``, None for one that no step takes, which may give it a place;
        True where it takes over those of all others."""
        if layout in self._known:
            self._num_others = 0
            return False
        self._num_others += 1
        if layout is None:
            return False
        if not self._known:
            self._add(layout, batch)
            return False
        num_seen = self._seen.pop(layout, 0) + 1
        self._seen[layout] = num_seen
        if len(self._seen) > _MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        if num_seen == 1 or (self.are_full and self._num_others < self._needed):
            return False
        took_over = self.are_full
        if took_over:
            self._needed *= 2
            self.forget()
        self._add(layout, batch)
        return took_over

    def forget(self) -> None:
        """Take all layouts their places."""
        self._known.clear()
        self._seen.clear()

    def _add(self, layout: Hashable, batch: Tree) -> None:
        self._seen.pop(layout, None)
        self._num_known, self._num_others = self._num_known + 1, 0
        self._known[layout] = KnownLayout(
            self._num_known, lengths_digest(batch), part_layouts(batch)
        )


class Layouts:
    """The layouts of captured steps, of one rank: several of fixed hotness, one of jagged batches.

    Where a layout takes over on one rank, all ranks have their engines begin anew, before the same
    step: :attr:`since` travels with the agreement on each batch. Until that is done no kind of step
    can train this rank's batches, since engines still have the old layouts.

    Args:
        model: what the steps train.
        most: the most layouts of fixed hotness that have steps at a time.

    Attributes:
        since: the number of the batch whose layout took over last; the same batch has it on all
            ranks.
        begun: ``since`` of all ranks when engines last began anew; whoever has them do it sets it.
    """

    def __init__(self, model: nn.Module, most: int) -> None:
        collections = [m for m in model.modules() if isinstance(m, StagedCollection)]
        self._all_wait = any(collection.always_waits_for_sizes for collection in collections)
        self._static, self._jagged = KindLayouts(most), KindLayouts(1)
        self._num_ranks = ranks.world_size()
        self.since = self.begun = 0
        self._moved: dict[type, bool] = {}
        """For each class of batches, True if its own ``to`` does nothing but move them."""

    def kinds_of(self, batch: Tree, number: int) -> BatchKinds:
        """The kinds of ``batch``, which may set the layout of its kind.

        Args:
            number: number of batches that were read before it, the same on all ranks.
        """
        layout, is_static = layout_of(batch), True
        known = self._static.placed(layout)
        if known is None:
            is_static = self._is_static(batch)
            layout = layout if is_static else jagged_layout(batch)
            layout = layout if self._only_moves(batch) else None
            of_kind = self._static if is_static else self._jagged
            if of_kind.takes_over(layout, batch):
                self.since = number
            known = of_kind.known(layout)
        if known is None or self.begun < self.since:
            return NO_KIND
        return BatchKinds(static=is_static, jagged=not is_static, layout=known.number)

    def _only_moves(self, batch: Tree) -> bool:
        kind = type(batch)
        if kind not in self._moved:
            self._moved[kind] = only_moves(batch)
        return self._moved[kind]

    def begin_anew(self, number: int, *, forget: bool = False) -> None:
        """Have engines begin anew on all ranks, before the step on the batch of ``number``.

        Args:
            forget: the layouts so far, as no batch will have them any more.
        """
        self.since = number
        if forget:
            self._static.forget()
            self._jagged.forget()

    def _is_static(self, batch: Tree) -> bool:
        return has_fixed_shape(batch) and not self._all_wait

    def why_eager(self, batch: Tree) -> Reason:
        """The reason why ``batch`` is of none of the kinds of captured steps."""
        of_kind = self._static if self._is_static(batch) else self._jagged
        if not self._only_moves(batch):
            return _DOES_MORE
        known = of_kind.last()
        reason = reason_of_layout(batch, None if known is None else known.parts)
        if reason is None or (self.begun < self.since and self._has_place(batch, of_kind)):
            return _TAKES_OVER
        if reason.where and of_kind is self._static and of_kind.are_full and of_kind.most > 1:
            there = f"there are steps for {of_kind.most} layouts, as many as max_layouts says"
            return reason._replace(what=f"{reason.what}; {there}")
        return reason

    def _has_place(self, batch: Tree, of_kind: KindLayouts) -> bool:
        layout = layout_of(batch) if of_kind is self._static else jagged_layout(batch)
        return of_kind.known(layout) is not None

    def start_agreement(
        self, batch: Tree, kinds: BatchKinds, *, has_spare: bool = False
    ) -> Callable[[], Agreement]:
        """Start to find out whether every rank's batch, of which ``batch`` is this rank's, is of
        ``kinds``, and whether parts of some are padded, as ``has_spare`` says of this rank's; every
        rank must call it.

        Returns:
            A function that waits for the result and returns it, in any thread.
        """
        num_ids = num_ids_in(batch) if kinds.jagged else 0
        if self._num_ranks == 1:
            agreement = Agreement(kinds, num_ids, self.since, (kinds.layout,), has_spare)
            return lambda: agreement
        known = (self._static if kinds.static else self._jagged).numbered(kinds.layout)
        digest = 0 if known is None else known.digest
        # One collective for all numbers. The maximum of a number is the minimum of its negative,
        # and digests are all equal where minimum and maximum are. Each rank has a place for the
        # number of its layout, in which the others' are larger.
        layouts = [_LARGER] * self._num_ranks
        layouts[ranks.rank()] = kinds.layout
        numbers = *kinds[:2], -num_ids, digest, -digest, -self.since, -has_spare, *layouts
        least = ranks.start_minimum(*numbers)
        # Each step asks several times.
        return functools.cache(lambda: _agreement(least()))


def _agreement(least: tuple[int, ...]) -> Agreement:
    """The agreement of all ranks, from the minimum over ranks of each of their numbers."""
    static, jagged, negated_num_ids, digest, negated_digest, *others = least
    negated_since, negated_spare, *layouts = others
    # Captured steps exchange ids as if every rank's features had one hotness and kind of weights.
    is_alike = digest == -negated_digest
    kinds = BatchKinds(static=bool(static) and is_alike, jagged=bool(jagged) and is_alike)
    return Agreement(kinds, -negated_num_ids, -negated_since, tuple(layouts), negated_spare < 0)
