"""A thread that runs tasks in order."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias, TypeVar

T = TypeVar("T")
_Task: TypeAlias = tuple[Callable[[], object], "Future[object]"]
_Tasks: TypeAlias = "queue.SimpleQueue[_Task | None]"
"""Tasks in order; None ends the thread."""


class Worker:
    """Runs tasks on a thread of its own, in the order in which they are submitted.

    The thread ends with the worker. It is a daemon, unlike a ``ThreadPoolExecutor``'s, so that it
    does not keep the process from ending while it waits for a rank that is gone.

    Engines of jagged batches exchange sizes on one, and :class:`ReadingThread` reads on another.
    On one thread for both, sizes would queue behind slow reads that batches read ahead are there
    to hide: with a step of 4 ms, reads of 1 ms and every tenth of 12 ms, a step takes 4.7 ms with
    two threads and 5.2 to 5.6 ms with one.
    """

    def __init__(self, name: str) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None)

    def submit(self, task: Callable[[], T]) -> "Future[T]":
        """Queue ``task``; the future gets what it returns or raises."""
        future: Future[T] = Future()
        self._tasks.put((task, future))  # type: ignore[arg-type]
        return future

    def close(self, timeout_seconds: float) -> None:
        """Let the thread end once all tasks are done, and wait for that up to
        ``timeout_seconds``."""
        self._tasks.put(None)
        self._thread.join(timeout_seconds)


def _work(tasks: _Tasks) -> None:
    while (item := tasks.get()) is not None:
        task, future = item
        try:
            future.set_result(task())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)
        # Freed now: the names would keep the batch alive until the next task comes.
        del item, task, future
