"""Steps on jagged batches in memory that has room for more ids than each has: static steps.

How many ids of a batch go from one rank to another, only the GPU knows at first. A thread of its
own finds out for the batches to come, over all ranks and through the CPU. A batch is prepared
without waiting for that, and again in steps with more room where it turns out to need them.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchembed.core.host_numbers import HostNumbers
from torchembed.step.batch_layout import (
    dense_tensors,
    is_on_gpu,
    to_device,
    with_dense_tensors,
    with_sparse_features,
)
from torchembed.step.captured_steps import CapturedSteps
from torchembed.step.capturing import captured_on_all_ranks
from torchembed.step.collection_calls import CollectionCall
from torchembed.step.jagged_step import JaggedStep
from torchembed.step.read_ahead import Upcoming
from torchembed.step.sorted_ids import Room, sort_ids
from torchembed.step.static_step import StaticStep
from torchembed.step.step_result import StepOutcome
from torchembed.step.streams import event_on, on, wait_for

_HEADROOM = 1.25
"""Batches may have so many times the ids that the first one has; with each that has more, steps are
captured anew, so that of any sizes there are few captures."""
_ROUND_TO = 256


class PaddedSteps:
    """Static steps on batches that differ in the lengths of bags, of a model whose collections all
    pool.

    The model is given its sparse features on the meta device, so that one that computes with ids
    itself, of which there are spare ones, fails instead.

    Args:
        make_step: a static step for an example, calls and room.
        first: has shown all lookups of the model, and has the thread that may wait for sizes.
    """

    def __init__(
        self,
        make_step: Callable[[Any, Sequence[CollectionCall], Room], StaticStep],
        first: JaggedStep,
        device: torch.device,
    ) -> None:
        self._make_step, self._device = make_step, device
        self._first, self._calls, self._worker = first, first.calls, first.worker
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._room = Room(num_ids=0, capacities=(0,) * len(first.calls))
        self._steps: CapturedSteps | None = None
        self._is_tried = False
        """Whether the model has trained in such a step."""

    @property
    def is_stale(self) -> bool:
        """Whether what its steps take for granted, at first the lookups, has changed."""
        return (self._first if self._steps is None else self._steps).is_stale

    @property
    def is_captured(self) -> bool:
        """Whether steps are graphs, while there is room."""
        return self._steps is not None and self._steps.is_captured

    def release(self) -> None:
        """Destroy the graphs."""
        if self._steps is not None:
            self._steps.release()
            self._steps = None

    def announce(self, upcoming: Upcoming) -> None:
        """Have the thread bring a batch to its slot, where there is room, and find out what it
        needs on its way. Every rank announces the same batches in the same order."""
        if self._steps is None:
            return
        step, room = self._steps.step, self._room.num_ids
        given = event_on(torch.cuda.current_stream()) if is_on_gpu(upcoming.batch) else None
        place = functools.partial(_place, step, upcoming, room, given, self._stream)
        upcoming.placed = self._worker.submit(place)
        needs = functools.partial(_needs, step, self._calls, upcoming, room)
        upcoming.needs = self._worker.submit(needs)

    def has_room_for(self, upcoming: Upcoming) -> bool:
        """Whether steps can take the batch, the same on all ranks; waits until that is known.

        Raises:
            IndexError, ValueError, TypeError: where it cannot be looked up.
        """
        if upcoming.placed is None or upcoming.needs is None:
            return False
        upcoming.placed.result()
        needs = upcoming.needs.result()
        if needs is None:
            return False
        pairs = zip(needs, self._room.capacities, strict=True)
        return all(needed <= there for needed, there in pairs)

    def make_room(self, now: Upcoming, upcoming: Iterable[Upcoming]) -> None:
        """Let steps take ``now``, and announce it and those that are ``upcoming`` again.

        Waits for the GPU. Every rank does it before the same step, when those before are done.
        """
        task = functools.partial(_measure, self._calls, now.batch, self._device, self._stream)
        before, needs = self._room, self._worker.submit(task).result()
        self._room = Room(
            _with_headroom(now.num_ids, before.num_ids),
            tuple(map(_with_headroom, needs, before.capacities)),
        )
        self.release()
        self._steps = CapturedSteps(self._make_step(now.batch, self._calls, self._room))
        for announced in (now, *upcoming):
            self.announce(announced)
        has_room = self.has_room_for(now)
        assert has_room

    def run(self, now: Upcoming, following: Upcoming | None) -> StepOutcome | None:
        """Train ``now``, that there is room for, and prepare ``following``.

        Returns:
            None where nothing was trained, since the model cannot be in such steps; a warning has
            said why.

        Raises:
            RuntimeError: where the first of them failed on a rank, and has changed the model here.
        """
        steps = self._steps
        assert steps is not None
        if following is not None and not self._is_placed(following):
            following = None
        outcomes: list[StepOutcome] = []

        def train() -> None:
            if steps.make_ready(now):
                outcomes.append(steps.run(now, following))

        if self._is_tried:
            train()
        else:
            self._is_tried = captured_on_all_ranks(train, "the train step")
            if not self._is_tried and steps.step.has_begun_update:
                raise RuntimeError(
                    "a train step failed, on this rank or another one, when it had begun to change "
                    "the model; the warning before says why; go on from a checkpoint"
                )
        if not self._is_tried or not outcomes:
            return None
        (outcome,) = outcomes
        # Its sparse features are as they were given: the step's own have spare ids.
        batch = with_dense_tensors(now.batch, dense_tensors(outcome.result.batch))
        return outcome._replace(result=outcome.result._replace(batch=batch))

    def _is_placed(self, following: Upcoming) -> bool:
        """Whether the step can prepare the batch; then the current stream waits until it can."""
        steps, placed, needs = self._steps, following.placed, following.needs
        assert steps is not None and steps.step.sorted is not None
        if placed is None or placed.exception() is not None or not placed.result():
            return False
        if not steps.is_captured and needs is not None:
            needs.exception()  # a capture sorts anew, which the thread may not do meanwhile
        steps.step.sorted.wait_until_sorted(following.turn)
        return True


def _with_headroom(needed: int, before: int) -> int:
    """Room for what is ``needed``, where there was some ``before``."""
    if needed <= before:
        return before
    return _ROUND_TO * math.ceil(_HEADROOM * needed / _ROUND_TO)


def _place(
    step: StaticStep,
    upcoming: Upcoming,
    room: int,
    given: "torch.cuda.Event | None",
    stream: "torch.cuda.Stream | None",
) -> bool:
    """Copy a batch, that is there from ``given`` on, to its slot and sort its ids there; False
    where it is no batch for these steps, or there is no room for a rank's ids: on all ranks, since
    preparing it is collective."""
    if not _has_place(upcoming, room):
        return False
    with on(stream):
        wait_for(given)
        step.slots.fill(upcoming.turn, with_sparse_features(upcoming.batch))
        assert step.sorted is not None
        step.sorted.sort(upcoming.turn)
    return True


def _needs(
    step: StaticStep, calls: Sequence[CollectionCall], upcoming: Upcoming, room: int
) -> list[int] | None:
    """Each call's capacity for a batch in its slot; None where it is not there."""
    if not _has_place(upcoming, room):
        return None
    assert step.sorted is not None
    return _agreed(calls, step.sorted.needed(upcoming.turn))


def _has_place(upcoming: Upcoming, room: int) -> bool:
    """Whether slots with ``room`` can take every rank's batch; waits for the ranks to read."""
    return upcoming.is_jagged() and upcoming.num_ids <= room


def _measure(
    calls: Sequence[CollectionCall],
    source: Any,
    device: torch.device,
    stream: "torch.cuda.Stream | None",
) -> list[int]:
    """Each call's capacity for a batch that lies elsewhere, and is there."""
    with on(stream):
        found = sort_ids(calls, to_device(source, device), device)
        return _agreed(calls, HostNumbers(found.needed).tolist())


def _agreed(calls: Sequence[CollectionCall], needed: Sequence[int]) -> list[int]:
    """The most that a rank needs for each call."""
    return [c.collection.agreed_capacity(n) for c, n in zip(calls, needed, strict=True)]
