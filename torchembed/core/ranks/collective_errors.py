"""Actions that fail on all ranks where they fail on one, so that none waits for the others."""

from collections.abc import Callable
from typing import TypeVar

from torchembed.core import ranks
from torchembed.core.ranks.cpu_group import CpuGroup

T = TypeVar("T")


def raise_on_all_ranks(action: Callable[[], T], what: str, group: CpuGroup | None = None) -> T:
    """This rank's ``action()``, which may not communicate; every rank must call it.

    Args:
        what: the action, as "could not ..." goes on.
        group: for the exchange of errors; the default process group where None.

    Raises:
        Exception: the action's own where it failed here.
        RuntimeError: if it failed on another rank, which it names.
        TimeoutError, ConnectionError: of ``group``, where ranks did not come, which it names.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as caught:  # noqa: BLE001 - raised below, once all ranks know of it
        error = caught
    message = None if error is None else described(error)
    messages = ranks.gather_objects(message) if group is None else group.gather(message, what)
    failures = {rank: message for rank, message in enumerate(messages) if message is not None}
    if error is not None:
        try:
            raise error
        finally:
            del error  # which holds this frame, and so what the action refers to
    if failures:
        raise failure_elsewhere(failures, what)
    return result  # type: ignore[return-value]


def decide_on_first_rank(decide: Callable[[], T], what: str, group: CpuGroup | None = None) -> T:
    """Rank 0's ``decide()``, small and picklable, on every rank; raises as
    :func:`raise_on_all_ranks` does."""
    decided = raise_on_all_ranks(lambda: decide() if ranks.rank() == 0 else None, what, group)
    if group is None:
        decided = ranks.from_first_rank(decided)
    else:
        decided = group.from_first_rank(decided, what)
    return decided  # type: ignore[return-value]


def described(error: BaseException) -> str:
    """Text of ``error`` that another rank can show."""
    return f"{type(error).__name__}: {error}"


def failure_elsewhere(failures: dict[int, str], what: str) -> RuntimeError:
    """Error to raise on a rank that succeeded, for ``failures``: texts by rank, at least one."""
    rank = min(failures)
    return RuntimeError(f"rank {rank} could not {what}: {failures[rank]}")
