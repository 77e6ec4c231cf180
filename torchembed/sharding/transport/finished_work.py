"""Collectives that backward makes, on the CPU: their works outlive gloo's use of them."""

import collections
from typing import Any

import torch.distributed as dist
from torch import Tensor

_finished: collections.deque[dist.Work] = collections.deque(maxlen=2)
"""A thread of gloo's lets go of a finished collective in its own time. From backward, that may free
a Python object, which ends the process where Python is shutting down by then. So the last ones are
kept until the main thread frees them: two, since each holds its tensors and gloo has two threads.
"""


def wait_for(work: dist.Work | None) -> None:
    """Wait for a collective on the CPU; on a GPU there is none, since its stream waits."""
    if work is not None:
        work.wait()
        _finished.append(work)


def all_reduce(tensor: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> None:
    """Make ``tensor`` the sum over ranks, or what ``op`` says, in place."""
    wait_for(dist.all_reduce(tensor, op, group=group, async_op=not tensor.is_cuda))
