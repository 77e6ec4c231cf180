"""A context in which Ctrl-C waits."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """A context at whose end the ``KeyboardInterrupt`` of Ctrl-C is raised that came within it, for
    changes that must be made whole or not at all.

    It is also raised where an error ends the context, and has that error as its ``__context__``. In
    other threads than the main one, which get no signals, it does nothing. It takes two system
    calls.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(signal.SIGINT, came[-1])
