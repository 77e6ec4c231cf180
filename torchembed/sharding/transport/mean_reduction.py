"""Reductions: tensors whose mean over ranks is taken in one collective."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.autograd.gradient_slots import FlatSpans
from torchembed.sharding.transport.finished_work import wait_for
from torchembed.sharding.transport.pushed_mean import PushedMean
from torchembed.sharding.transport.two_level_mean import TwoLevelMean, UnfinishedMean


class Numbers(NamedTuple):
    """Additional numbers that are averaged with gradients."""

    flat: Tensor
    put: Callable[[Tensor], None]
    """Takes their mean."""
    ready: torch.cuda.Event | None
    """Recorded on a GPU once they are computed, for other streams to wait for."""


class Reduction(NamedTuple):
    """A reduction that was started."""

    work: dist.Work | torch.cuda.Event | UnfinishedMean
    memory: list[Tensor]
    """Tensors that are reduced in place, those of ``numbers`` last."""
    gradients: list[Tensor]
    """Gradients that the mean is copied to from the first of ``memory``; empty where it is reduced
    in their own memory."""
    numbers: Sequence[Numbers]

    def drop(self) -> None:
        """End it without its results: waits for it on a CPU."""
        # On a GPU it may be of a capture that failed, and not to be waited for.
        if isinstance(self.work, UnfinishedMean):
            self.work.drop()
        elif not (isinstance(self.work, torch.cuda.Event) or self.memory[0].is_cuda):
            wait_for(self.work)


class Reducer:
    """Starts reductions, and waits for them.

    Args:
        group: without other collectives.
        dtype: in which tensors are summed, their own where None.
        push: averages by push, within one node.
        two_level: averages over several nodes. The group's all-reduce is used where both are None.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        dtype: torch.dtype | None,
        push: PushedMean | None,
        two_level: TwoLevelMean | None = None,
    ) -> None:
        self._group, self._dtype, self._push, self._two_level = group, dtype, push, two_level

    def start(
        self,
        spans: FlatSpans | None,
        gradients: list[Tensor],
        numbers: Sequence[Numbers],
        number: int,
    ) -> Reduction:
        """Start to average ``spans`` and ``numbers``.

        Args:
            spans: None where there are only ``numbers``.
            gradients: that take the mean of ``spans``; empty for those in the memory of the spans.
            numbers: averaged with them.
            number: of the reduction in its backward.
        """
        for _, _, ready in numbers:
            if ready is not None:
                torch.cuda.current_stream().wait_event(ready)
        flats = [flat for flat, _, _ in numbers]
        memory = [] if spans is None else spans.parts()
        if self._push is not None:
            dtype = self._dtype or (flats[0] if spans is None else spans.flat).dtype
            whole = [FlatSpans(flat, [(0, flat.numel())]) for flat in flats]
            numbered = whole if spans is None else [spans, *whole]
            done = self._push.start(numbered, dtype, number)
            return Reduction(done, memory + flats, gradients, numbers)
        if self._two_level is not None:
            tensors = memory + flats
            mean, work = self._two_level.start(tensors, self._dtype or tensors[0].dtype)
            return Reduction(work, [mean], [*(gradients or memory), *flats], numbers)
        if spans is not None and self._dtype not in (None, spans.flat.dtype):
            # Reduced in another dtype, in a copy, whose mean goes back to the gradients or the
            # spans.
            gradients = gradients or memory
            memory = [torch.cat(memory).to(self._dtype)]
        memory += flats
        # One coalesced collective for all tensors of the bucket.
        options = dist.AllreduceCoalescedOptions()
        averages = self._averages(memory[0].device)
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM)
        options.asyncOp = True
        work = self._group.allreduce_coalesced(memory, options)
        return Reduction(work, memory, gradients, numbers)

    def wait_for(self, reduction: Reduction) -> None:
        """Let the current stream wait for ``reduction``, and copy its results to the gradients."""
        work, memory, gradients, numbers = reduction
        if isinstance(work, torch.cuda.Event | UnfinishedMean) or memory[0].is_cuda:
            # Only the current stream waits, not the host, but for an unfinished mean on a CPU.
            work.wait()
        else:
            wait_for(work)
        # Gloo has no average, so its sum is divided.
        if not self._averages(memory[0].device):
            torch._foreach_div_(memory, dist.get_world_size(self._group))  # type: ignore[attr-defined]
        if gradients:
            parts = memory[0].split([gradient.numel() for gradient in gradients])
            shaped = [part.view(g.shape) for g, part in zip(gradients, parts, strict=True)]
            torch._foreach_copy_(gradients, shaped)  # type: ignore[attr-defined]
        for flat, put, _ in numbers:
            put(flat)
        # The memory was used on other streams: the allocator must not reuse it before this one.
        for tensor in memory:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream())

    def _averages(self, device: torch.device) -> bool:
        """True if reductions give the mean, False if they give the sum."""
        sums_elsewhere = self._push is not None or self._two_level is not None
        return sums_elsewhere or self._group._get_backend(device).name() == "nccl"
