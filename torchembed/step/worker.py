"""A thread that does one thing after the other."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Worker:
    """Calls what it is given on a thread of its own, in the order in which it was given.

    The thread goes when the worker does, and does not keep the process from ending: it may wait for
    other processes that are gone.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._tasks = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None)

    def submit(self, task: Callable[[], Any]) -> "Future[Any]":
        """Have ``task`` called; the result of the future is what it returns or raises."""
        future: Future[Any] = Future()
        self._tasks.put((task, future))
        return future

    def close(self, timeout_seconds: float) -> None:
        """Let the thread end once everything is done; wait for it as long."""
        self._tasks.put(None)
        self._thread.join(timeout_seconds)


def _work(tasks: "queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]") -> None:
    while (item := tasks.get()) is not None:
        task, future = item
        try:
            future.set_result(task())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)
        # What they hold is not to wait for the next one.
        del item, task, future
