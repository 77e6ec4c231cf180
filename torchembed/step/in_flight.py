"""Steps that the device may not have finished."""

import collections
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchembed.core import ranks
from torchembed.core.process_exit import exit_process_within
from torchembed.modules.bad_ids import Suspect
from torchembed.sharding.transport.channel import PushDomain
from torchembed.step.bad_batches import raise_for
from torchembed.step.step_result import StepOutcome

_POLL_SECONDS = 2e-5
_GRACE_SECONDS = 10.0
"""For a program to say why it ends."""


class _Step(NamedTuple):
    done: torch.cuda.Event
    report: Tensor | None
    suspects: list[Suspect]
    held: Any
    """Kept until the step is done."""


class StepsInFlight:
    """The steps that the host is ahead of the device.

    Args:
        timeout_seconds: how long one is waited for.
        push_domains: where GPUs store into each other's memory; they wait for each other as long.
    """

    def __init__(self, timeout_seconds: float, push_domains: Sequence[PushDomain] = ()) -> None:
        self._timeout_seconds, self._push_domains = timeout_seconds, push_domains
        for domain in push_domains:
            domain.limit_seconds = timeout_seconds
        self._steps: collections.deque[_Step] = collections.deque()

    def add(self, outcome: StepOutcome) -> None:
        """Note the step of ``outcome``."""
        _, report, suspects, held, done = outcome
        if done is None:
            done = torch.cuda.Event()
            done.record()
        self._steps.append(_Step(done, report, suspects, held))

    def wait_until(self, count: int) -> None:
        """Wait until at most ``count`` are left, the oldest first.

        Raises:
            IndexError: for a bad id of a step that is done; further steps are left.
            TimeoutError: where a step takes too long, or a GPU waited in vain for another one. One
                of several ranks then ends soon.
        """
        while len(self._steps) > count:
            oldest = self._steps[0]
            self._wait_for(oldest)
            self._steps.popleft()
            self._check_push()
            if oldest.report is not None:
                skip, *found = oldest.report.tolist()
                raise_for(skip, found, oldest.suspects)

    def wait_for_all(self) -> None:
        """Wait for the steps so far; :meth:`wait_until` then raises for their ids.

        Raises:
            TimeoutError: likewise.
        """
        for step in self._steps:
            self._wait_for(step)

    def _wait_for(self, step: _Step) -> None:
        if not _wait(step.done, time.monotonic() + self._timeout_seconds):
            if ranks.world_size() > 1:
                exit_process_within(_GRACE_SECONDS)
            raise TimeoutError(
                f"the GPU has not finished a step in {self._timeout_seconds:g} s; where "
                "several ranks train, look for one that died or is stuck"
            )

    def _check_push(self) -> None:
        try:
            for domain in self._push_domains:
                domain.check()
        except TimeoutError:
            exit_process_within(_GRACE_SECONDS)
            raise

    def finish_within(self, seconds: float) -> bool:
        """Whether all of them do."""
        deadline = time.monotonic() + seconds
        return all(_wait(step.done, deadline) for step in self._steps)


def _wait(done: torch.cuda.Event, deadline: float) -> bool:
    """Whether ``done`` comes before the ``deadline`` of the monotonic clock."""
    while not done.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
