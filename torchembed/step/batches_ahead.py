"""Batches in memory that stays where it is, and what is found out of each before it is trained."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchembed.core.trees import map_tensors, tensors_in
from torchembed.modules.bad_ids import Suspect, deferred_bad_ids
from torchembed.modules.preparing import Announced, Prepared
from torchembed.step.bad_batches import Verdict, either, judge
from torchembed.step.batch_layout import (
    dense_tensors,
    with_dense_tensors,
    with_room,
    without_ids,
)
from torchembed.step.batch_slots import BatchSlots
from torchembed.step.collection_calls import CollectionCall
from torchembed.step.sorted_ids import Room, SortedSlots


class PreparedBatch(NamedTuple):
    """What is found out about a batch while the one before is trained."""

    lookups: list[Prepared]
    verdict: Verdict | None


class BatchesAhead:
    """The batches of two turns: one is prepared while the other one is trained.

    Args:
        example: a batch of their layout.
        calls: all lookups of the model; needed where there is a ``room``.
        room: for jagged batches, as :class:`~torchembed.step.static_step.StaticStep` has it.
        group: the ranks that train together; None for one.

    Attributes:
        slots: where batches come, each in its turn.
        batches: of each turn what the model is given, once it was prepared.
        sorted: of jagged batches: each is to be sorted in its slot before it is prepared.
        calls: all lookups of the model; whoever finds out sets it.
        prepared: of each turn, where there are calls.
        suspects: of each turn the ids that may be bad, as far as preparing it has looked.
    """

    def __init__(
        self,
        example: Any,
        calls: Sequence[CollectionCall] | None,
        room: Room | None,
        *,
        device: torch.device,
        group: Any,
    ) -> None:
        self._room, self._group = room, group
        self.slots = BatchSlots(
            example if room is None else with_room(example, room.num_ids), device
        )
        self.sorted: SortedSlots | None = None
        if room is None:
            self.batches = [map_tensors(torch.empty_like, batch) for batch in self.slots.batches]
        else:
            assert calls is not None
            bare = without_ids(example)
            self.batches = [
                with_dense_tensors(bare, map(torch.empty_like, dense_tensors(batch)))
                for batch in self.slots.batches
            ]
            self.sorted = SortedSlots(self.slots, calls, device)
        self.calls = None if calls is None else list(calls)
        self.prepared: list[PreparedBatch | None] = [None, None]
        self.suspects: list[list[Suspect]] = [[], []]

    @property
    def are_prepared(self) -> bool:
        """Whether all was found out of both that can be."""
        return not self.calls or None not in self.prepared

    @torch.no_grad()
    def prepare(self, turn: int, *, in_place: bool) -> None:
        """Take over the batch in slot ``turn``, and find out what its ids say; collective.

        Args:
            in_place: what was found out of the batch before is overwritten, since a graph reads it
                where it is.
        """
        if self.sorted is not None and self.sorted.batches[turn] is None:
            return  # on no rank anything has come there yet
        slot, batch = self.slots.batches[turn], self.batches[turn]
        if self.sorted is not None:
            slot, batch = dense_tensors(slot), dense_tensors(batch)
        _copy_tree(slot, batch)
        if not self.calls:
            return
        announced, suspects = self._announced(self.calls, turn)
        # Before ids are sorted: what backward sends comes after this collective.
        verdict = judge(suspects, self._group)
        with deferred_bad_ids() as more:
            lookups = self._lookups(self.calls, announced, turn, in_place=in_place)
        found = PreparedBatch(lookups, either(verdict, judge(more, self._group)))
        known = self.prepared[turn]
        if known is not None and in_place:
            _copy_tree(found, known)
        else:  # of the first capture too: the second one reads what it writes
            self.prepared[turn], self.suspects[turn] = found, [*suspects, *more]

    def _announced(
        self, calls: Sequence[CollectionCall], turn: int
    ) -> tuple[list[Announced], list[Suspect]]:
        """What is known of the batch of ``turn`` before its ids travel, and ids that may be bad."""
        if self.sorted is not None:
            ids = self.sorted.batches[turn]
            assert ids is not None
            return ids.of_calls, ids.suspects
        batch = self.batches[turn]
        with deferred_bad_ids() as suspects:
            return [c.collection.announce(c.features_of(batch)) for c in calls], suspects

    def _lookups(
        self,
        calls: Sequence[CollectionCall],
        announced: Sequence[Announced],
        turn: int,
        *,
        in_place: bool,
    ) -> list[Prepared]:
        """What is then known of it."""
        pairs = list(zip(calls, announced, strict=True))
        if self._room is None:
            return [call.collection.prepare_announced(of_call) for call, of_call in pairs]
        lookups = []
        for (call, of_call), capacity in zip(pairs, self._room.capacities, strict=True):
            found = call.collection.prepare_announced(of_call, capacity).lookups
            if not in_place:
                # None of it in the memory of sorted ids, which the next batch gets.
                found = map_tensors(torch.clone, found)
            lookups.append(Prepared(call.features_of(self.batches[turn]), found))
        return lookups


def _copy_tree(source: Any, target: Any) -> None:
    for new, old in zip(tensors_in(source), tensors_in(target), strict=True):
        if new is not old:
            old.copy_(new)
