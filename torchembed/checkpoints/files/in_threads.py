"""Work on many files at once, in threads that an ending program may still begin."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

NUM_THREADS = 4
"""Threads of a rank: enough that checksums and copies do not hold up a disk of some GB/s."""


def in_threads(action: Callable[[T], None], items: Sequence[T]) -> None:
    """Run ``action(item)`` for each item in up to ``NUM_THREADS`` threads; raise the first error.

    Threads of ``concurrent.futures`` may not begin once the program has come to its end, where an
    asynchronous save may still be under way.
    """
    # An iterator over a list gives each item to one thread alone, since a call of next is atomic.
    left, errors = iter(items), []

    def work() -> None:
        for item in left:
            if errors:
                return
            try:
                action(item)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

    threads = [
        threading.Thread(target=work, name="checkpoint-file")
        for _ in range(min(NUM_THREADS, len(items)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
