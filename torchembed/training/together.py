"""Actions that fail on all ranks where they fail on one, so that none waits for the others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchembed.training import ranks

T = TypeVar("T")


def together(action: Callable[[], T], what: str, group: dist.ProcessGroup | None = None) -> T:
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
    described = None if error is None else _described(error)
    failed = enumerate(ranks.gather_objects(described, group))
    failures = {rank: message for rank, message in failed if message is not None}
    if error is not None:
        raise error
    if failures:
        raise _elsewhere(failures, what)
    return result  # type: ignore[return-value]


def first_rank_decides(
    decide: Callable[[], T], what: str, group: dist.ProcessGroup | None = None
) -> T:
    """What rank 0's ``decide()`` returned, small and picklable, on every rank; raises as
    :func:`together` does."""
    decided = together(lambda: decide() if ranks.rank() == 0 else None, what, group)
    return ranks.from_first_rank(decided, group)


@contextmanager
def ordinary_errors(what: str) -> Iterator[None]:
    """``torch.distributed.checkpoint`` tells all ranks of a failure by an exception that is no
    ``Exception``; here it becomes what :func:`together` raises."""
    try:
        yield
    except CheckpointException as failed:
        errors = {rank: error for rank, (error, _) in failed.failures.items()}
        if ranks.rank() in errors:
            raise errors[ranks.rank()] from None
        described = {rank: _described(error) for rank, error in errors.items()}
        raise _elsewhere(described, what) from None


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _elsewhere(failures: dict[int, str], what: str) -> RuntimeError:
    rank = min(failures)
    return RuntimeError(f"rank {rank} could not {what}: {failures[rank]}")
