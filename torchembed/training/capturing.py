"""Captures that succeed on all ranks, or are given up by all."""

import warnings
from collections.abc import Callable

from torchembed.training import ranks


def captured_on_all_ranks(capture: Callable[[], None], what: str) -> bool:
    """Whether ``capture()`` succeeds on all ranks, each of which calls it; where it does not, a
    warning says why ``what`` is going to be eager."""
    error = None
    try:
        capture()
    except Exception as caught:  # noqa: BLE001 - said in the warning, once all ranks know
        error = caught
    if not ranks.any_rank(error is not None):
        return True
    warnings.warn(
        f"{what} could not be captured as a CUDA graph, so it runs eagerly from now on: "
        f"{_reason(error)}",
        stacklevel=6,  # whoever called the pipeline
    )
    return False


def _reason(error: Exception | None) -> str:
    """The first of the errors that led to ``error``."""
    if error is None:
        return "another rank failed, whose warning says why"
    first: BaseException = error
    while first.__context__ is not None:
        first = first.__context__
    lines = str(first).splitlines()
    return f"{type(first).__name__}: {lines[0] if lines else ''}"
