"""Errors of ``torch.distributed.checkpoint``, as every other collective action raises them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from torchembed.core import ranks
from torchembed.core.collective_errors import described, failure_elsewhere


@contextmanager
def errors_of_all_ranks(what: str) -> Iterator[None]:
    """``torch.distributed.checkpoint`` tells all ranks of a failure by an exception that is no
    ``Exception``; here it becomes what :func:`raise_on_all_ranks` raises."""
    try:
        yield
    except CheckpointException as failed:
        errors = {rank: error for rank, (error, _) in failed.failures.items()}
        if ranks.rank() in errors:
            raise errors[ranks.rank()] from None
        messages = {rank: described(error) for rank, error in errors.items()}
        raise failure_elsewhere(messages, what) from None
