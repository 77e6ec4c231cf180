"""Access to a database that is now and then opened anew."""

import contextlib
import threading
from collections.abc import Iterator


class Gate:
    """Any number of threads is inside at a time, or one alone, which goes before those that come
    later. Neither context may be entered inside another one of the same gate."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._is_taken = False
        """True while a thread is alone inside, or waits until it is."""

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Context that others may be in, too."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_taken)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                if self._is_taken:
                    self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Context in which no other thread is."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_taken)
            self._is_taken = True
            self._changed.wait_for(lambda: not self._num_inside)
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()
