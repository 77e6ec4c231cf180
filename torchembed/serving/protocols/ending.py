"""The graceful end of a program that serves."""

import signal
import threading
from collections.abc import Sequence
from typing import Protocol


class EndingServer(Protocol):
    """A server that can end."""

    def refuse_new(self) -> None: ...

    def stop(self, grace_seconds: float) -> None: ...


def serve_until_signalled(servers: Sequence[EndingServer], grace_seconds: float = 30.0) -> int:
    """Wait for SIGTERM or SIGINT, end all servers at once, and return the signal's number.

    None of them is ready from then on, or takes new requests; those under way may end in
    ``grace_seconds``. A second signal does what it did before this call.

    Call it on the main thread.
    """
    came = threading.Event()
    number = 0
    former = {}

    def end(signal_number: int, frame: object) -> None:
        nonlocal number
        number = signal_number
        for each, handler in former.items():
            signal.signal(each, handler)
        came.set()

    for each in (signal.SIGTERM, signal.SIGINT):
        former[each] = signal.signal(each, end)
    came.wait()
    for server in servers:
        server.refuse_new()
    threads = [threading.Thread(target=server.stop, args=(grace_seconds,)) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return number
