"""Actions that fail on all ranks where they fail on one, so that none waits for the others."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from torchembed.core import ranks

T = TypeVar("T")


def raise_on_all_ranks(
    action: Callable[[], T], what: str, group: dist.ProcessGroup | None = None
) -> T:
    """This rank's ``action()``, which may not communicate; every rank must call it.

    Args:
        what: the action, as "could not ..." goes on.
        group: all ranks, through the CPU; the default group where it is None.

    Raises:
        Exception: the action's own where it failed here.
        RuntimeError: where it failed on another rank, which it names.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as caught:  # noqa: BLE001 - raised below, once all ranks know of it
        error = caught
    message = None if error is None else described(error)
    failed = enumerate(ranks.gather_objects(message, group))
    failures = {rank: message for rank, message in failed if message is not None}
    if error is not None:
        raise error
    if failures:
        raise failure_elsewhere(failures, what)
    return result  # type: ignore[return-value]


def decide_on_first_rank(
    decide: Callable[[], T], what: str, group: dist.ProcessGroup | None = None
) -> T:
    """What rank 0's ``decide()`` returned, small and picklable, on every rank; raises as
    :func:`raise_on_all_ranks` does."""
    decided = raise_on_all_ranks(lambda: decide() if ranks.rank() == 0 else None, what, group)
    return ranks.from_first_rank(decided, group)


def described(error: BaseException) -> str:
    """The error as text that another rank can show."""
    return f"{type(error).__name__}: {error}"


def failure_elsewhere(failures: dict[int, str], what: str) -> RuntimeError:
    """The error of a rank that succeeded, for ``failures``: texts by rank, not empty."""
    rank = min(failures)
    return RuntimeError(f"rank {rank} could not {what}: {failures[rank]}")
