"""Load: requests sent by several clients at once, as fast as they are answered or at a rate."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

from torchembed.serving.bench.latencies import Latencies, latencies

T = TypeVar("T")


class LoadResult(NamedTuple):
    """What became of a load."""

    num_requests: int
    """Answered ones."""
    num_failed: int
    seconds: float
    """From the first request's time to the last answer."""
    requests_per_second: float
    latencies: Latencies
    first_failure: str
    """Empty where none failed."""


def run_load(
    connect: Callable[[], AbstractContextManager[Callable[[T], object]]],
    num_clients: int,
    requests: Sequence[T],
    *,
    seconds: float,
    rate: float | None = None,
) -> LoadResult:
    """Send requests for some time, each client one after the other in a thread of its own.

    Args:
        connect: a client's connection, opened and closed in the client's thread: it asks one
            request and returns when that is answered.
        num_clients: threads.
        requests: sent in turn, over and over.
        seconds: for how long requests are begun.
        rate: requests a second of all clients together. Each has its time from the beginning on,
            and its latency counts from that time, whether or not a client was free then. None for
            each client to send as soon as its last request is answered.

    Raises:
        RuntimeError: where no request was answered.
    """
    numbers, lock = itertools.count(), threading.Lock()
    taken: list[float] = []
    failures: list[str] = []
    begin = time.perf_counter()

    def send() -> None:
        with connect() as ask:
            ask_on(ask)

    def ask_on(ask: Callable[[T], object]) -> None:
        while True:
            with lock:
                number = next(numbers)
            due = time.perf_counter() if rate is None else begin + number / rate
            if due >= begin + seconds:
                return
            time.sleep(max(0.0, due - time.perf_counter()))
            try:
                ask(requests[number % len(requests)])
            except Exception as error:  # noqa: BLE001 - counted, and the first one is told
                with lock:
                    failures.append(f"{type(error).__name__}: {error}")
                continue
            latency = time.perf_counter() - due
            with lock:
                taken.append(latency)

    threads = [threading.Thread(target=send) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - begin
    if not taken:
        raise RuntimeError(f"no request was answered, and {len(failures)} failed: {failures[:1]}")
    return LoadResult(
        num_requests=len(taken),
        num_failed=len(failures),
        seconds=elapsed,
        requests_per_second=len(taken) / elapsed,
        latencies=latencies(taken),
        first_failure=failures[0] if failures else "",
    )
