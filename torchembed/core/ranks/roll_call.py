"""Record, in the process group's store, of which ranks have entered a collective."""

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from torchembed.core import ranks

T = TypeVar("T")

STORE_SECONDS = 10.0
"""Limit for one operation of a store that answers at once, if its process lives."""


class RollCall:
    """Records in the default process group's store how many collectives each rank has come to.

    The error of a failed collective does not say which rank is missing; this record does. A store
    hangs where the process that serves it is stopped, so each operation on it runs in a thread with
    a time limit. After one has failed none is tried again, since a roll call must not make the
    collective fail.
    """

    def __init__(self, name: str, timeout: datetime.timedelta) -> None:
        """
        Args:
            name: the same on every rank, and of no other roll call.
            timeout: how long a rank may wait for another.
        """
        self._store = PrefixStore(f"torchembed/{name}", _get_default_store())
        self._timeout = timeout
        self._num_arrivals = 0
        self._arrived_at = time.monotonic()
        self._error: str | None = None

    def wait_for_all(self, what: str) -> None:
        """Return once every rank has come here; for the first call of all ranks.

        Raises:
            TimeoutError: names the ranks that did not come in time, as failing to do ``what``.
        """
        self._arrived_at = time.monotonic()
        mine, keys = str(ranks.rank()), [str(rank) for rank in range(ranks.world_size())]
        self._ask(lambda: self._store.set(mine, "0"))
        self._ask(lambda: self._wait(keys), self._timeout.total_seconds())
        if self._error is not None:
            raise TimeoutError(f"could not {what}: {self._unknown()}")
        absent = self._ask(lambda: [rank for rank, key in enumerate(keys) if not self._has(key)])
        if absent is None:
            raise TimeoutError(f"could not {what}: {self._unknown()}")
        if absent:
            raise TimeoutError(f"could not {what}: {self._late(absent)}")

    def arrive(self) -> None:
        """Record that this rank comes to its next collective."""
        self._num_arrivals += 1
        self._arrived_at = time.monotonic()
        mine, count = str(ranks.rank()), str(self._num_arrivals)
        self._ask(lambda: self._store.set(mine, count))

    def error_of(self, failure: RuntimeError, what: str) -> OSError:
        """The error to raise for a ``failure`` of the collective that this rank came to last.

        Returns:
            ``TimeoutError`` where the time limit has passed, else ``ConnectionError``; names the
            ranks that have not come.
        """
        has_timed_out = time.monotonic() - self._arrived_at >= self._timeout.total_seconds()
        absent = self._ask(self._absent)
        if absent is None:
            reason = f"{failure}; {self._unknown()}"
        elif not absent:
            reason = (
                f"{failure}; every rank came to it, so one has ended, was stopped or has given up "
                "waiting: see its output"
            )
        elif has_timed_out:
            return TimeoutError(f"could not {what}: {self._late(absent)}")
        else:
            reason = (
                f"the connection to another rank was lost ({failure}), and {_named(absent)} had "
                "not come by then"
            )
        kind = TimeoutError if has_timed_out else ConnectionError
        return kind(f"could not {what}: {reason}")

    def _wait(self, keys: Sequence[str]) -> None:
        # Stores differ in the error of a time limit; one of another kind comes again when the store
        # is asked who is missing.
        with contextlib.suppress(RuntimeError):
            self._store.wait(list(keys), self._timeout)

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _absent(self) -> list[int]:
        counts = self._store.multi_get([str(rank) for rank in range(ranks.world_size())])
        return [rank for rank, count in enumerate(counts) if int(count) < self._num_arrivals]

    def _late(self, absent: Sequence[int]) -> str:
        return (
            f"{_named(absent)} did not come within {self._timeout.total_seconds():g} s; every rank "
            "must call it, and ranks that need longer, to write their files for example, need a "
            "longer timeout"
        )

    def _unknown(self) -> str:
        return (
            "which ranks came is not known, since the store of the process group, which rank 0 or "
            f"torchrun serves, does not answer ({self._error})"
        )

    def _ask(self, action: Callable[[], T], waiting_seconds: float = 0.0) -> T | None:
        """``action()``, of the store, or None where it fails or does not end.

        Args:
            waiting_seconds: how long the store itself may wait before it answers.
        """
        if self._error is not None:
            return None
        results: list[T] = []
        errors: list[RuntimeError] = []

        def work() -> None:
            try:
                results.append(action())
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=work, name="roll-call", daemon=True)
        thread.start()
        seconds = waiting_seconds + STORE_SECONDS
        thread.join(seconds)
        if results:
            return results[0]
        self._error = str(errors[0]) if errors else f"no answer within {seconds:g} s"
        return None


def _named(absent: Sequence[int]) -> str:
    noun = "rank" if len(absent) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, absent))}"
