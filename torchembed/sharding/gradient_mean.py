"""Gradients of dense parameters: their mean over ranks, the rule of DDP, under backward."""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchembed.core.gradient_slots import FlatSpans, gather_gradients, joint_spans, slot_of
from torchembed.ops.weight_gradients import (
    is_waiting,
    on_gradient_stream,
    when_gradients_are_complete,
)
from torchembed.sharding.finished_work import wait_for
from torchembed.sharding.pushed_mean import PushedMean
from torchembed.tables import table_of

BUCKET_BYTES = 1 << 22
"""A bucket takes no more parameters once it has as many."""


class _Bucket:
    """Parameters whose gradients are reduced together, once all of them are there."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.num_bytes = 0
        self.missing: set[Tensor] = set()


class _Reduction(NamedTuple):
    """The sum or mean of a bucket on its way."""

    work: dist.Work | torch.cuda.Event
    memory: list[Tensor]
    gradients: list[Tensor]
    """What the mean is copied to from the one part of ``memory``; none where that is theirs."""


class GradientMean:
    """Averages the gradients of parameters over ranks, bucket by bucket, while backward goes on.

    Every rank must run backward equally often. A parameter without a gradient on this rank counts
    as zeros. Gradients that accumulate over several backwards come out as the mean of the sums.
    Buckets are filled, and reduced on every rank, in the order in which the first rank's gradients
    came in the first backward, and in that one from the last parameter to the first. What lies in
    a flat buffer, as with :class:`~torchembed.optim.DenseOptimizer`, is reduced there. All are done
    at the end of backward, or of the
    :class:`~torchembed.ops.weight_gradients.DeferredWeightGradients` around it.

    The parameters keep it.

    Args:
        parameters: in the order of the model.
        group: of no other collectives, so that its own come in one order on all ranks.
        dtype: in which gradients are summed; their own where None. They keep theirs.
        push: takes the means by push; the group's all-reduce does where it is None.
        bucket_bytes: a bucket takes no more parameters once it has as many.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: Any,
        *,
        dtype: torch.dtype | None = None,
        push: PushedMean | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._parameters = list(parameters)
        self._places: dict[Tensor, int] = {p: place for place, p in enumerate(self._parameters)}
        self._order = self._parameters[::-1]
        self._arrived: dict[Tensor, None] | None = {}
        """In the first backward, whose gradients are there; None from then on."""
        self._push = push
        self._group = group
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []
        """Of the backward that runs, in their order; none between them, unless one failed."""
        self._bucket_of: dict[Tensor, _Bucket] = {}
        self._reductions: list[_Reduction] = []
        self._finishing: Callable[[], Any] = _nothing
        """Gives what is to be called at the end of the backward; None where that failed."""
        # Garbage collection sees what a parameter's attributes hold, but not what its hooks do.
        hook = functools.partial(_call, weakref.WeakMethod(self._on_gradient))
        for parameter in filter(torch.is_floating_point, self._parameters):
            # Torch takes no hooks of what is frozen, which may train later.
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
            parameter.requires_grad_(is_trained)
            parameter.torchembed_gradient_mean = self  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        # A parameter that is pickled leaves the other ranks behind.
        return _nothing, ()

    def _on_gradient(self, parameter: Tensor) -> None:
        if not _is_averaged(parameter):
            return  # the engine also calls where it has no gradient
        if self._buckets and self._finishing() is None:
            self._discard()
        if not self._buckets:
            self._fill_buckets()
            finish = functools.partial(self._finish)
            self._finishing = weakref.ref(finish)
            when_gradients_are_complete(finish)
        bucket = self._bucket_of.get(parameter)
        # The engine also calls for a gradient that is deferred; that one is not there yet.
        if bucket is not None and not is_waiting(parameter):
            if self._arrived is not None:
                self._arrived[parameter] = None
            bucket.missing.discard(parameter)
            while self._remaining() and not self._remaining()[0].missing:
                self._reduce(self._remaining()[0])

    def _remaining(self) -> list[_Bucket]:
        """Buckets that are not reduced yet."""
        return self._buckets[len(self._reductions) :]

    def _fill_buckets(self) -> None:
        """Anew for each backward: what trains, and what optimizers have laid out, may change."""
        open_buckets: dict[torch.dtype, _Bucket] = {}
        for parameter in self._order:
            if not parameter.requires_grad or not _is_averaged(parameter):
                continue
            bucket = open_buckets.get(parameter.dtype)
            if bucket is None or bucket.num_bytes >= self._bucket_bytes:
                bucket = open_buckets[parameter.dtype] = _Bucket()
                self._buckets.append(bucket)
            bucket.parameters.append(parameter)
            bucket.num_bytes += parameter.numel() * parameter.element_size()
            bucket.missing.add(parameter)
            self._bucket_of[parameter] = bucket
        for bucket in self._buckets:
            # As they lie in flat buffers.
            bucket.parameters.sort(key=self._places.__getitem__)

    def _reduce(self, bucket: _Bucket) -> None:
        with on_gradient_stream():
            # The layout, which is the same on all ranks, says what is reduced, and not where this
            # rank's gradients happen to lie.
            spans, gradients = joint_spans(bucket.parameters), []
            if spans is not None:
                gather_gradients(bucket.parameters)
            for parameter in bucket.parameters:
                if parameter.grad is None:
                    slot = slot_of(parameter)
                    zeros = torch.zeros_like(parameter) if slot is None else slot.memory.zero_()
                    parameter.grad = zeros.detach()
            if spans is None:
                gradients = [p.grad for p in bucket.parameters if p.grad is not None]
                memory = torch.cat([gradient.reshape(-1) for gradient in gradients])
                spans = FlatSpans(memory, [(0, memory.numel())])
            if self._push is not None:
                done = self._push.start(spans, self._dtype or spans.flat.dtype)
                reduction = _Reduction(done, spans.parts(), gradients)
            else:
                reduction = self._all_reduce(spans, gradients)
        self._reductions.append(reduction)

    def _all_reduce(self, spans: FlatSpans, gradients: list[Tensor]) -> _Reduction:
        """Begin to sum ``spans`` over ranks: there, or in a copy in the dtype that is asked for,
        which belongs back into ``gradients``, or where it came from."""
        memory = spans.parts()
        if self._dtype not in (None, spans.flat.dtype):
            gradients = gradients or memory
            memory = [torch.cat(memory).to(self._dtype)]
        options = dist.AllreduceCoalescedOptions()
        averages = self._averages(spans.flat.device)
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM)
        options.asyncOp = True
        return _Reduction(self._group.allreduce_coalesced(memory, options), memory, gradients)

    def _averages(self, device: torch.device) -> bool:
        """Whether what comes is the mean already, and not the sum."""
        is_pushed = self._push is not None
        return is_pushed or self._group._get_backend(device).name() == "nccl"

    def _finish(self) -> None:
        while self._remaining():
            self._reduce(self._remaining()[0])
        for work, memory, gradients in self._reductions:
            if isinstance(work, torch.cuda.Event) or memory[0].is_cuda:
                work.wait()
            else:
                wait_for(work)
            if not self._averages(memory[0].device):
                torch._foreach_div_(memory, dist.get_world_size(self._group))  # type: ignore[attr-defined]
            if gradients:
                parts = memory[0].split([gradient.numel() for gradient in gradients])
                shaped = [part.view(g.shape) for g, part in zip(gradients, parts, strict=True)]
                torch._foreach_copy_(gradients, shaped)  # type: ignore[attr-defined]
        self._clear()
        self._agree_on_order()

    def _agree_on_order(self) -> None:
        """After the first backward, take over the order in which the first rank's gradients came;
        the others' come last."""
        if self._arrived is None:
            return
        late = (parameter for parameter in self._order if parameter not in self._arrived)
        in_order = [self._places[p] for p in (*self._arrived, *late)]
        places = torch.tensor(in_order, device="cpu")
        self._arrived = None
        first = dist.get_global_rank(self._group, 0)
        wait_for(dist.broadcast(places, src=first, group=self._group, async_op=True))
        self._order = [self._parameters[place] for place in places.tolist()]

    def _discard(self) -> None:
        """What a backward that failed has left."""
        for work, memory, _ in self._reductions:
            # On a GPU it may be of a capture that failed, and not to be waited for.
            if not (isinstance(work, torch.cuda.Event) or memory[0].is_cuda):
                wait_for(work)
        self._clear()

    def _clear(self) -> None:
        self._reductions.clear()
        self._buckets.clear()
        self._bucket_of.clear()


def _is_averaged(parameter: Tensor) -> bool:
    """Whether its gradient is not a fused optimizer's affair."""
    table = table_of(parameter)
    return table is None or table.group.rule is None


def _call(method: Callable[[], Callable[[Tensor], None] | None], parameter: Tensor) -> None:
    """Call the method that a weak reference leads to."""
    found = method()
    if found is not None:
        found(parameter)


def _nothing() -> None:
    return None
