"""Warnings of torch about itself, which tell callers nothing."""

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def without_warnings_of_copies() -> Iterator[None]:
    """A context without the FutureWarning that torch 2.13 gives of its own copies of programs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        yield
