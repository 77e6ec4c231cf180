"""Calls over gRPC whose clients are waited for, each for a bounded time."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from torchembed.serving.protocols.options import ClientTimeouts

_CHECKS_IN_TIME = 10
"""How often calls are looked through in the time that each of them has."""


class WaitingCalls:
    """Cancels calls whose message is not there whole in time, or whose answer is not read in time.

    A client that begins a call and sends nothing more would keep a thread for ever, and one that
    reads nothing the memory of its answer.

    Args:
        timeouts: how long a message, and the reading of an answer, may take; a tenth more at most.
    """

    def __init__(self, timeouts: ClientTimeouts) -> None:
        self._timeouts = timeouts
        self._deadlines: dict[grpc.ServicerContext, float] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._cancel_late_ones, name="torchembed-grpc-waiting", daemon=True
        )

    def start(self) -> None:
        """Begin to look for late calls."""
        self._thread.start()

    def close(self) -> None:
        """Look no further; calls that are there go on."""
        self._ended.set()

    @contextlib.contextmanager
    def receiving(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Have a call cancelled unless the block ends in time."""
        self._bound(context, self._timeouts.receive_seconds)
        try:
            yield
        finally:
            self._forget(context)

    def sending(self, context: grpc.ServicerContext, on_end: Callable[[], None]) -> None:
        """Have a call, whose handler is about to return its answer, cancelled unless its client has
        read that in time; ``on_end`` is called when the call has ended."""

        def end() -> None:
            self._forget(context)
            on_end()

        self._bound(context, self._timeouts.send_seconds)
        if not context.add_callback(end):  # it has ended already
            end()

    def _bound(self, context: grpc.ServicerContext, seconds: float) -> None:
        with self._lock:
            self._deadlines[context] = time.monotonic() + seconds

    def _forget(self, context: grpc.ServicerContext) -> None:
        with self._lock:
            self._deadlines.pop(context, None)

    def _cancel_late_ones(self) -> None:
        seconds = min(self._timeouts.receive_seconds, self._timeouts.send_seconds)
        # Looked through now and then, so that a call in time costs no thread a wake-up.
        while not self._ended.wait(min(seconds / _CHECKS_IN_TIME, threading.TIMEOUT_MAX)):
            now = time.monotonic()
            with self._lock:
                late = [call for call, deadline in self._deadlines.items() if deadline <= now]
                for call in late:
                    self._deadlines[call] = math.inf
            for call in late:
                call.cancel()  # type: ignore[attr-defined]
