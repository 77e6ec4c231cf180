"""A thread that inserts rows behind lookups."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)

M = TypeVar("M")


class InsertionThread(Generic[M]):
    """One thread that handles what it is given in that order; at most so many wait for it.

    Args:
        handle: what is done with each. Where it raises, that is logged and counted, and the thread
            goes on with the next.
        note_failure: called where it raised.
        max_waiting: the most that wait.
    """

    def __init__(
        self, handle: Callable[[M], None], note_failure: Callable[[], None], max_waiting: int
    ) -> None:
        self._handle, self._note_failure = handle, note_failure
        self._waiting: queue.Queue[M | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._run, name="row insertion", daemon=True)
        self._thread.start()

    def offer(self, item: M) -> bool:
        """Hand ``item`` to the thread; False where too many wait, and it is not handled at all."""
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            return False
        return True

    def wait(self) -> None:
        """Return when all that was offered before has been handled."""
        self._waiting.join()

    def close(self) -> None:
        """End the thread, after what waits for it; nothing may be offered from then on."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        while True:
            item = self._waiting.get()
            try:
                if item is None:
                    return
                self._handle(item)
            except Exception:  # noqa: BLE001 - whatever it is, others wait for the thread
                _log.exception("missing rows were not inserted; lookups will miss them again")
                self._note_failure()
            finally:
                self._waiting.task_done()
