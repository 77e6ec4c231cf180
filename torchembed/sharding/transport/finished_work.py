"""Collectives in backward, on the CPU: their work objects are kept until gloo is done with them."""

import collections

import torch.distributed as dist
from torch import Tensor

_finished: collections.deque[dist.Work] = collections.deque(maxlen=2)
"""The last collectives, which the main thread frees when others follow.

A thread of gloo drops its reference to a finished collective in its own time. If that is the last
reference, it frees Python objects, which crashes the process while Python shuts down. Two are kept,
since gloo has two threads and each work holds its tensors.
"""


def wait_for(work: dist.Work | None) -> None:
    """Wait for a collective on the CPU; None for one on a GPU, whose stream waits."""
    if work is not None:
        work.wait()
        # Appending drops the oldest work object here, in a thread that Python itself runs.
        _finished.append(work)


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """All-reduce of ``tensor`` by ``op``, in place; backward may call it."""
    wait_for(dist.all_reduce(tensor, op, group=group, async_op=not tensor.is_cuda))
