"""The mean over the ranks of several nodes, in two levels: within each node, and between nodes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from torchembed.sharding.transport.finished_work import wait_for


class NodeGroups(NamedTuple):
    """The two process groups that a rank of several nodes is in, all of one size each."""

    within: dist.ProcessGroup
    """The ranks of its node."""
    between: dist.ProcessGroup
    """The ranks of all nodes that have its place in their node."""


class StartedMean(NamedTuple):
    """A mean that was started."""

    mean: Tensor
    """Elements of all tensors, one after another, ``[n]``; the mean once ``work`` is done."""
    work: "torch.cuda.Event | UnfinishedMean"


class TwoLevelMean:
    """Averages tensors over the ranks of several nodes, which the links between these limit.

    A reduce-scatter within the node leaves each rank one share of the node's sums, an all-reduce
    among the ranks of equal place sums it over nodes, and an all-gather within the node brings the
    shares together. An element crosses the links between nodes once for each node and not once for
    each rank, and the ranks that wait for each other are those of a node and one of each node. One
    rank of each node gets the sum of an element and passes it on, so that all have the same bits.

    Args:
        groups: without other collectives.
    """

    def __init__(self, groups: NodeGroups) -> None:
        self._groups = groups
        self._stream: torch.cuda.Stream | None = None

    def start(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> StartedMean:
        """Start to average ``tensors``, which are read now and not changed, in ``dtype``.

        On a GPU all is done on another stream than the current one. On a CPU the first level is
        started, and the wait for the mean takes the others. Collective; the ranks' tensors have the
        same sizes.
        """
        if not tensors[0].is_cuda:
            flat, num_elements = self._gathered(tensors, dtype)
            return StartedMean(flat[:num_elements], UnfinishedMean(flat, self._groups))
        if self._stream is None:
            # Of the priority of pushed means, and for the same reason.
            self._stream = torch.cuda.Stream(tensors[0].device, priority=-3)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            flat, num_elements = self._gathered(tensors, dtype)
            for tensor in tensors:
                tensor.record_stream(self._stream)
            UnfinishedMean(flat, self._groups).wait()
            done = torch.cuda.Event()
            done.record()
        return StartedMean(flat[:num_elements], done)

    def _gathered(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, int]:
        """The elements of ``tensors`` in ``dtype``, with zeros behind them up to a multiple of the
        node's ranks, and how many they are."""
        num_elements = sum(tensor.numel() for tensor in tensors)
        padding = -num_elements % self._groups.within.size()
        flat = tensors[0].new_empty(num_elements + padding, dtype=dtype)
        parts = flat[:num_elements].split([tensor.numel() for tensor in tensors])
        shaped = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(shaped, list(tensors))  # type: ignore[attr-defined]
        flat[num_elements:].zero_()
        return flat, num_elements


class UnfinishedMean:
    """A mean whose reduce-scatter was started.

    Args:
        flat: averaged in place, ``[n]`` with ``n`` a multiple of the node's ranks.
        groups: as those of :class:`TwoLevelMean`.
    """

    def __init__(self, flat: Tensor, groups: NodeGroups) -> None:
        self._flat, self._groups = flat, groups
        self._share = flat.new_empty(flat.numel() // groups.within.size())
        # Gloo has no average, so its sum is divided.
        self._averages = groups.within._get_backend(flat.device).name() == "nccl"
        average_or_sum = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        self._op = dist.ReduceOp(average_or_sum)
        options = dist.ReduceScatterOptions()
        options.reduceOp, options.asyncOp = self._op, True
        self._scattering = groups.within._reduce_scatter_base(self._share, flat, options)

    def wait(self) -> None:
        """Wait for the node's sums, and take the other levels; on a GPU the current stream waits,
        and not the host. Collective, in the order in which means were started."""
        self._wait_for(self._scattering)
        reducing = dist.AllreduceOptions()
        reducing.reduceOp, reducing.asyncOp = self._op, True
        self._wait_for(self._groups.between.allreduce([self._share], reducing))
        gathering = AllgatherOptions()
        gathering.asyncOp = True
        self._wait_for(self._groups.within._allgather_base(self._flat, self._share, gathering))
        if not self._averages:
            self._flat /= self._groups.within.size() * self._groups.between.size()

    def drop(self) -> None:
        """End it after the first level, without a mean."""
        self._wait_for(self._scattering)

    def _wait_for(self, work: dist.Work) -> None:
        if self._flat.is_cuda:
            work.wait()
        else:
            wait_for(work)
