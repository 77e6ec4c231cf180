"""What is found out of batches in static places before any id travels: how many will."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchembed.modules.bad_ids import Suspect, deferred_bad_ids
from torchembed.modules.preparing import Announced
from torchembed.step.batch_slots import BatchSlots
from torchembed.step.collection_calls import CollectionCall
from torchembed.step.streams import wait_for


class Room(NamedTuple):
    """How many ids static steps can take of batches whose lengths vary."""

    num_ids: int
    """Of each of a batch's sparse features."""
    capacities: tuple[int, ...]
    """Of each call of a collection the most that go from one rank to another."""


class SortedBatch(NamedTuple):
    """A batch's ids by where they go."""

    of_calls: list[Announced]
    suspects: list[Suspect]
    needed: Tensor
    """int64 ``[calls]``: how many go from this rank to one, at most."""


def sort_ids(calls: Sequence[CollectionCall], batch: Any, device: torch.device) -> SortedBatch:
    """Sort the ids of a batch on ``device``, without waiting for it."""
    with torch.no_grad(), deferred_bad_ids() as suspects:
        of_calls = [call.collection.sort(call.features_of(batch)) for call in calls]
        none = torch.zeros((), dtype=torch.int64, device=device)
        needed = [
            call.collection.needed_capacity(announced)
            for call, announced in zip(calls, of_calls, strict=True)
        ]
        numbers = torch.stack([none if number is None else number.long() for number in needed])
        return SortedBatch(of_calls, suspects, numbers)


class SortedSlots:
    """Of each of two slots the batch in it, sorted; by CUDA graphs once they are captured, into
    memory that the next batch of the slot then takes."""

    def __init__(
        self, slots: BatchSlots, calls: Sequence[CollectionCall], device: torch.device
    ) -> None:
        self._slots, self._calls, self._device = slots, calls, device
        self.batches: list[SortedBatch | None] = [None, None]
        self._graphs: list[torch.cuda.CUDAGraph | None] = [None, None]
        is_cuda = device.type == "cuda"
        self._needed = [
            torch.zeros(len(calls), dtype=torch.int64, pin_memory=is_cuda) for _ in range(2)
        ]
        # One that blocks leaves the processor to the thread that launches steps.
        self._done = [torch.cuda.Event(blocking=True) if is_cuda else None for _ in range(2)]

    def sort(self, turn: int) -> None:
        """Sort what is in slot ``turn``; the current stream does, once the slot is filled."""
        self._slots.wait_until_filled(turn)
        graph, done = self._graphs[turn], self._done[turn]
        if graph is None:
            self._sort(turn)
        else:
            graph.replay()
        if done is not None:
            done.record()
        # No step may have read what is sorted again for a capture, or never trained.
        self._slots.note_use(turn)

    def needed(self, turn: int) -> list[int]:
        """Of each call the most ids that go to one rank; waits for the last :meth:`sort`."""
        done = self._done[turn]
        if done is not None:
            done.synchronize()
        return self._needed[turn].tolist()

    def wait_until_sorted(self, turn: int) -> None:
        """Let the current stream wait for the last :meth:`sort`."""
        wait_for(self._done[turn])

    def capture(self, stream: "torch.cuda.Stream") -> None:
        """Capture the sorting of both slots, where that was not done, and do it again."""
        for turn in (0, 1):
            if self._graphs[turn] is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    self._sort(turn)
                self._graphs[turn] = graph
                self.sort(turn)

    def release(self) -> None:
        """Destroy the graphs."""
        for graph in self._graphs:
            if graph is not None:
                graph.reset()
        self._graphs = [None, None]

    def _sort(self, turn: int) -> None:
        batch = sort_ids(self._calls, self._slots.batches[turn], self._device)
        self._needed[turn].copy_(batch.needed, non_blocking=True)
        self.batches[turn] = batch
