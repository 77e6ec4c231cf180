"""Steps that the device may not have finished, and what the host raises once it has."""

import collections
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core import ranks
from torchembed.core.ranks.process_exit import exit_process_within
from torchembed.modules.lookup.bad_ids import IdCheck
from torchembed.sharding.transport.channel import PushDomain
from torchembed.step.stages import TrainedBatch

_POLL_SECONDS = 2e-5
_GRACE_SECONDS = 10.0
"""The time that a program has to say why it ends."""


class StepsInFlight:
    """The steps that the host is ahead of the device.

    Args:
        timeout_seconds: how long one is waited for.
        push_domains: where GPUs store into each other's memory; they wait for each other as long.
    """

    def __init__(
        self,
        timeout_seconds: float,
        push_domains: Sequence[PushDomain] = (),
        *,
        is_cuda: bool,
    ) -> None:
        self._timeout_seconds, self._push_domains = timeout_seconds, push_domains
        self._is_cuda = is_cuda
        for domain in push_domains:
            domain.limit_seconds = timeout_seconds
        self._steps: collections.deque[TrainedBatch] = collections.deque()

    def add(self, trained: TrainedBatch) -> None:
        """Note a step that was launched."""
        # An eager step has noted no event. One recorded now is reached once the step is done.
        if trained.done is None and self._is_cuda:
            done = torch.cuda.Event()
            done.record()
            trained = trained.held_until(done, trained.source, trained.place)
        self._steps.append(trained)

    def wait_until(self, count: int) -> None:
        """Wait until at most ``count`` are left, the oldest first.

        Raises:
            IndexError: for a bad id of a step that is done; further steps are left.
            TimeoutError: if a step takes too long, or a GPU waited in vain for another one. One
                of several ranks then ends soon.
        """
        while len(self._steps) > count:
            oldest = self._steps[0]
            self._wait_for(oldest)
            self._steps.popleft()
            self._check_push()
            if oldest.report is not None:
                _raise_bad_ids(oldest.report, oldest.checks)

    def wait_for_all(self) -> None:
        """Wait for the steps so far; :meth:`wait_until` then raises for their ids.

        Raises:
            TimeoutError: likewise.
        """
        for step in self._steps:
            self._wait_for(step)

    def _wait_for(self, step: TrainedBatch) -> None:
        if not _wait(step.done, time.monotonic() + self._timeout_seconds):
            # Closing the program would hang too, since CUDA waits for the stuck kernel: a thread
            # that is not Python's ends the process.
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
        """True if all steps end within ``seconds``."""
        deadline = time.monotonic() + seconds
        return all(_wait(step.done, deadline) for step in self._steps)


def _wait(done: torch.cuda.Event | None, deadline: float) -> bool:
    """True if ``done`` comes before the ``deadline`` of the monotonic clock; on a CPU, where there
    is no event, every step is done."""
    while done is not None and not done.query():
        if time.monotonic() > deadline:
            return False
        # Not event.synchronize(), which knows no deadline.
        time.sleep(_POLL_SECONDS)
    return True


def _raise_bad_ids(report: Tensor, checks: Sequence[IdCheck]) -> None:
    """Raise the error of a check that failed, as ``report`` says, which is on the host."""
    skip, *found = report.tolist()
    if not skip:
        return
    first = 0
    for check in checks:
        numbers = found[first : first + len(check.found)]
        if numbers[0] < check.num_ids:
            raise check.error(f"{check.describe(*numbers)}. That step changed nothing")
        first += len(numbers)
    # Ranks look up with the same checks, also those of tables that only others hold.
    is_of_ids = all(check.error is IndexError for check in checks)
    what = "id out of range" if is_of_ids else "id out of range, or no room for rows,"
    raise IndexError(
        f"{what} in another rank's batch, whose error says more. That step changed nothing"
    )
