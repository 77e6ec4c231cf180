"""Calls over gRPC whose message is to come, each for a bounded time."""

import contextlib
import math
import threading
import time
from collections.abc import Iterator

import grpc

_CHECKS_IN_TIME = 10
"""How often calls are looked through in the time that each of them has."""


class ReceivingCalls:
    """Cancels calls whose message is not there whole in time: a client that begins a call and sends
    nothing more would keep a thread for ever.

    Args:
        seconds: that a message may take; a tenth more at most.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadlines: dict[grpc.ServicerContext, float] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._cancel_late_ones, name="torchembed-grpc-receiving", daemon=True
        )

    def start(self) -> None:
        """Begin to look for late calls."""
        self._thread.start()

    def close(self) -> None:
        """Look no further; calls that are there go on."""
        self._ended.set()

    @contextlib.contextmanager
    def bounded(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Have a call cancelled unless the block ends in time."""
        with self._lock:
            self._deadlines[context] = time.monotonic() + self._seconds
        try:
            yield
        finally:
            with self._lock:
                self._deadlines.pop(context, None)

    def _cancel_late_ones(self) -> None:
        # Looked through now and then, so that a call in time costs no thread a wake-up.
        while not self._ended.wait(min(self._seconds / _CHECKS_IN_TIME, threading.TIMEOUT_MAX)):
            now = time.monotonic()
            with self._lock:
                late = [call for call, deadline in self._deadlines.items() if deadline <= now]
                for call in late:
                    self._deadlines[call] = math.inf
            for call in late:
                call.cancel()  # type: ignore[attr-defined]
