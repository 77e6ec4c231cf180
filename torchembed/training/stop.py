"""Graceful stopping: a signal to one rank ends all ranks after the same step."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self, TypeAlias

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None


class StopSignal:
    """Handles SIGTERM and SIGINT while it is entered: :func:`train` and :func:`evaluate` then end
    after a batch, the same one on every rank, whichever rank got the signal.

    The ranks learn of it in the all-reduce before each step. ``torchrun`` kills processes that
    still run 30 seconds after a signal (its ``--shutdown-timeout``, or
    ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``), so saving must take less, or be given more. A second SIGINT
    interrupts at once, as Python does. Entered outside the main thread, which alone may handle
    signals, it only serves :meth:`request`.
    """

    def __init__(self) -> None:
        self.is_requested = False
        """True once this rank was asked to stop."""
        self.is_agreed = False
        """True once all ranks know, so that there is no further batch."""
        self._replaced: dict[signal.Signals, _Handler] = {}

    def request(self) -> None:
        """Ask to stop, as a signal does."""
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
