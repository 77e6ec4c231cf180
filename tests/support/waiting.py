"""Waits for what other threads and processes bring about."""

import time
from collections.abc import Callable

LIMIT_SECONDS = 300.0
"""After which a wait fails: many times what a busy machine takes."""


def wait_until(is_so: Callable[[], bool], say: Callable[[], object] | None = None) -> None:
    """Ask until a condition holds, which must be before the limit; ``say`` says why not."""
    end = time.monotonic() + LIMIT_SECONDS
    while not is_so():
        assert time.monotonic() < end, say() if say else "it does not come true"
        time.sleep(0.005)
