"""Routing of ids that are admitted next: admission finds their rows, so that routing need not."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_awaits_admission: ContextVar[bool] = ContextVar("awaits_admission", default=False)


@contextlib.contextmanager
def awaited_admission() -> Iterator[None]:
    """A context for the routing of a batch that is admitted before its rows are read."""
    token = _awaits_admission.set(True)
    try:
        yield
    finally:
        _awaits_admission.reset(token)


def awaits_admission() -> bool:
    """True within :func:`awaited_admission`."""
    return _awaits_admission.get()
