"""Captures that succeed on all ranks, or are given up by all."""

import os
import traceback
import warnings
from collections.abc import Callable

from torchembed.core import ranks
from torchembed.step.stages import Reason
from torchembed.step.watches.host_state import HostState
from torchembed.step.watches.watched_values import NotCapturable

_LIBRARIES = frozenset(("torch", "torchembed", "torchrec", "fbgemm_gpu", "contextlib", "functools"))
"""Packages whose code is not where a user would look."""
_ON_ANOTHER_RANK = "another rank failed, whose warning says why"


def failure_on_any_rank(capture: Callable[[], object], host_state: HostState) -> Reason | None:
    """Call ``capture()`` on every rank, and return None if it succeeds on all of them.

    Where it does not, a warning gives the reason, which is returned: train steps run eagerly from
    then on, and ``host_state`` is put back, since the batch of the capture is trained eagerly.
    Collective.
    """
    reason, restore = None, host_state.saved()
    try:
        capture()
    except Exception as error:  # noqa: BLE001 - said in the warning, once all ranks know
        # Not the error itself, whose traceback would hold what autograd has made.
        reason = _reason(error)
    # Through the CPU, and on every rank, whatever happened: a capture itself waits for no other
    # rank.
    if not ranks.any_rank(reason is not None):
        return None
    restore()
    warnings.warn(
        "the train step could not be captured as a CUDA graph, so it runs eagerly from now on: "
        f"{reason or _ON_ANOTHER_RANK}",
        stacklevel=7,  # whoever called the pipeline
    )
    return Reason(f"the capture failed: {reason or _ON_ANOTHER_RANK}")


def _reason(error: Exception) -> str:
    """The first of the errors that led to ``error``, and where it arose."""
    if isinstance(error, NotCapturable):
        return str(error)
    first: BaseException = error
    while first.__context__ is not None:
        first = first.__context__
    lines = str(first).splitlines()
    return f"{type(first).__name__}: {lines[0] if lines else ''}{_place(first)}"


def _place(error: BaseException) -> str:
    """The last line of the user's own code on the way to ``error``; empty where there is none, as
    in backward."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_name == "__torch_dispatch__":
            break  # of a mode around the step, which the model knows nothing of
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
            place = f" ({os.path.basename(code.co_filename)}:{line}, in {code.co_qualname})"
    return place
