"""Signals that ask a run to end, and the step after which every rank does."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Takes note of SIGTERM and SIGINT while it is entered; :func:`train` and :func:`evaluate` then
    end after a batch, the same one on every rank, whichever rank got the signal.

    The ranks learn of it with what they tell each other before each step anyway. ``torchrun`` ends
    what still runs 30 seconds after a signal (its ``--shutdown-timeout``, or
    ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``), so saving must take less, or get more. A second SIGINT
    interrupts at once, as Python does. Entered outside the main thread, which alone may handle
    signals, it only serves :meth:`request`.
    """

    def __init__(self) -> None:
        self.is_requested = False
        """True where this rank was asked to stop."""
        self.is_agreed = False
        """True where all ranks know: there is no further batch."""
        self._replaced: dict[signal.Signals, Any] = {}

    def request(self) -> None:
        """Ask for the end, as a signal does."""
        self.is_requested = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.is_requested:
            raise KeyboardInterrupt
        self.request()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._replaced = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced = {}
