"""The mean of dense gradients over ranks, as in DDP, bucket by bucket during backward."""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchembed.autograd.gradient_slots import FlatSpans, gather_gradients, joint_spans, slot_of
from torchembed.autograd.weight_gradients import (
    are_deferred,
    completing,
    is_waiting,
    on_gradient_stream,
    when_gradients_are_complete,
)
from torchembed.core.left_behind import LeftBehind
from torchembed.sharding.planning.bucket_size import bucket_bytes
from torchembed.sharding.transport.finished_work import wait_for
from torchembed.sharding.transport.mean_reduction import Numbers, Reducer, Reduction
from torchembed.sharding.transport.pushed_mean import PushedMean
from torchembed.sharding.transport.sparse_mean import average_sparse_gradient
from torchembed.sharding.transport.two_level_mean import NodeGroups, TwoLevelMean
from torchembed.sharding.wire import BUCKET_BYTES
from torchembed.tables import table_of

_FEW_BYTES = 1 << 20
"""Size up to which additional numbers do not prolong the last collective noticeably."""
_NUMBERS = object()
"""Stands for the additional numbers in :attr:`_Bucket.missing`."""


class _Bucket:
    """Parameters whose gradients are reduced in one collective, once all of them are there."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.num_bytes = 0
        self.missing: set[object] = set()
        """Parameters whose gradients are not there yet, and ``_NUMBERS``."""


class GradientMean(LeftBehind):
    """Averages the gradients of parameters over ranks, bucket by bucket, while backward goes on.

    Every rank must run backward equally often. A parameter without a gradient on this rank counts
    as zeros. Gradients that accumulate over several backwards come out as the mean of the sums.
    Buckets are filled and reduced on every rank in one order: in the first backward from the last
    parameter to the first, from then on as the first rank's gradients came in it. Gradients in a
    flat buffer, as with :class:`~torchembed.optim.DenseOptimizer`, are reduced there. All are
    complete at the end of backward, or of the
    :class:`~torchembed.autograd.weight_gradients.DeferredWeightGradients` around it.

    Additional numbers are reduced with them (:meth:`add`): in the last bucket of their dtype, since
    they come late, or in the one before it where they are many, since backward waits for the last.

    The parameters keep this object alive. Their copies, pickled or by ``copy.deepcopy``, leave it
    behind: they must not average over ranks, since the others would not take part.

    Args:
        parameters: in the order of the model.
        group: without other collectives, so that its own come in one order on all ranks.
        dtype: in which gradients are summed, their own where None; they keep their dtype.
        push: averages by push, within one node.
        nodes: groups like ``group``, by which gradients are averaged in two levels over several
            nodes. The group's all-reduce is used where this and ``push`` are None.
        bucket_bytes: size from which on a bucket takes no further parameter, at least.
        meeting_bytes: :func:`~torchembed.sharding.planning.bucket_size.bytes_of_a_meeting` of the
            ranks; larger buckets follow from it.
        sparse: those of the parameters whose gradients are sparse; they are averaged after the
            others.
        borrowed: the loan of ``group``, kept as long as this object.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        dtype: torch.dtype | None = None,
        push: PushedMean | None = None,
        nodes: NodeGroups | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        meeting_bytes: float = 0.0,
        sparse: Iterable[nn.Parameter] = (),
        borrowed: object = None,
    ) -> None:
        self._borrowed = borrowed
        self._sparse = list(sparse)
        self._is_running = False
        """True during a backward, and after one that failed."""
        self._parameters = list(parameters)
        self._places: dict[Tensor, int] = {p: place for place, p in enumerate(self._parameters)}
        self._order = self._parameters[::-1]
        self._arrived: dict[Tensor, None] | None = {}
        """Parameters in the order of their gradients in the first backward; None after it."""
        two_level = None if nodes is None else TwoLevelMean(nodes)
        self._reducer = Reducer(group, dtype, push, two_level)
        self._group = group
        self._dtype = dtype
        self._least_bytes, self._meeting_bytes = bucket_bytes, meeting_bytes
        self._buckets: list[_Bucket] = []
        """Buckets of the current backward, in order; empty between backwards, unless one failed."""
        self._bucket_of: dict[Tensor, _Bucket] = {}
        self._reductions: list[Reduction] = []
        self._numbers: list[Numbers] = []
        self._carriers: list[_Bucket] = []
        """The last buckets, two at most, one of which carries the additional numbers."""
        self._left_out: set[nn.Parameter] = set()
        self._finishing: Callable[[], object] = _nothing
        """Weak reference to the callback at the end of the current backward; returns None where
        that backward failed."""
        # The hook holds this object weakly: garbage collection does not see references from hooks,
        # so a strong one would keep the model for ever. The parameter's attribute keeps it instead.
        hook = functools.partial(_call, weakref.WeakMethod(self._on_gradient))
        self._hooks: list[tuple[nn.Parameter, RemovableHandle]] = []
        self._last_number = 0
        """The number of handles that had been made when hooks were last put in order."""
        for parameter in filter(torch.is_floating_point, self._parameters):
            # Torch refuses hooks on a frozen parameter, but it may train later.
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)
            self._hooks.append((parameter, parameter.register_post_accumulate_grad_hook(hook)))
            parameter.requires_grad_(is_trained)
            parameter.torchembed_gradient_mean = self  # type: ignore[attr-defined]

    def leave_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Stop averaging the gradients of ``parameters`` from the next backward on; the same ones
        on all ranks."""
        self._left_out = set(parameters)

    def come_last(self) -> None:
        """Have gradients averaged after the hooks that were registered on parameters since, as in
        DDP: what these change is averaged. Called before a forward."""
        # Every registration takes the next number of a counter in torch.
        if RemovableHandle.next_id == self._last_number:
            return
        self._last_number = RemovableHandle.next_id
        for parameter, handle in self._hooks:
            hooks = parameter._post_accumulate_grad_hooks
            if hooks and handle.id in hooks and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)

    def _is_averaged(self, parameter: Tensor) -> bool:
        return parameter not in self._left_out and _is_averaged(parameter)

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._is_averaged(parameter):
            # Hooks also run for tables of fused optimizers, whose gradients go to the optimizer.
            return
        self._begin()
        if not self._buckets:
            self._fill_buckets()
        bucket = self._bucket_of.get(parameter)
        # The engine also calls for a gradient that is deferred; that one is not there yet.
        if bucket is not None and not is_waiting(parameter):
            if self._arrived is not None:
                self._arrived[parameter] = None
            bucket.missing.discard(parameter)
            self._reduce_complete()

    @property
    def numbers_dtype(self) -> torch.dtype:
        """Dtype of the numbers that :meth:`add` takes."""
        return self._dtype or torch.float32

    def add(self, numbers: Tensor, put: Callable[[Tensor], None]) -> None:
        """Average ``numbers [n]`` too, in place, and pass their mean to ``put`` at the end.

        Called during backward, on every rank in the same backward and order, with equally many.
        """
        self._begin()
        ready = None
        # Reduced later, and maybe on another stream, which must not read them before this one
        # wrote.
        if numbers.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self._numbers.append(Numbers(numbers, put, ready))

    def _begin(self) -> None:
        """Note that a backward runs, at whose end all other gradients will be reduced."""
        # The engine drops its callbacks where a backward fails, and the weak reference dies with
        # them: what that backward has left is discarded now.
        if self._is_running and self._finishing() is None:
            self._discard()
        if not self._is_running:
            self._is_running = True
            # A new object for each backward. The engine holds the only strong reference, so that
            # the weak one tells if the engine still has it.
            finish = functools.partial(self._finish)
            self._finishing = weakref.ref(finish)
            when_gradients_are_complete(finish)

    def _reduce_complete(self) -> None:
        """Start to reduce buckets that are complete, in order, up to the first that is not.

        Ranks get gradients in different orders, but must start the same collectives in one.
        """
        while self._remaining() and not self._remaining()[0].missing:
            self._reduce(self._remaining()[0])

    def _remaining(self) -> list[_Bucket]:
        """Buckets that are not reduced yet."""
        return self._buckets[len(self._reductions) :]

    def _fill_buckets(self) -> None:
        """Assign parameters to buckets, for each backward: ``requires_grad`` and flat buffers may
        have changed since the last."""
        open_buckets: dict[torch.dtype, _Bucket] = {}
        sparse = set(self._sparse)
        parameters = [
            parameter
            for parameter in self._order
            if parameter.requires_grad and self._is_averaged(parameter) and parameter not in sparse
        ]
        full_bytes = self._full_bytes(parameters)
        for parameter in parameters:
            bucket = open_buckets.get(parameter.dtype)
            if bucket is None or bucket.num_bytes >= full_bytes:
                bucket = open_buckets[parameter.dtype] = _Bucket()
                self._buckets.append(bucket)
            bucket.parameters.append(parameter)
            bucket.num_bytes += parameter.numel() * parameter.element_size()
            bucket.missing.add(parameter)
            self._bucket_of[parameter] = bucket
        for bucket in self._buckets:
            # In the order of flat buffers, so that a bucket is few spans of them.
            bucket.parameters.sort(key=self._places.__getitem__)
        self._choose_carriers()

    def _full_bytes(self, parameters: Sequence[Tensor]) -> int:
        """The size of a bucket that takes no further one of ``parameters``, which are averaged."""
        if not self._meeting_bytes:
            return self._least_bytes
        own = sum(p.numel() * p.element_size() for p in parameters)
        sent = sum(p.numel() * (self._dtype or p.dtype).itemsize for p in parameters)
        return bucket_bytes(own, sent, self._meeting_bytes, self._least_bytes)

    def _choose_carriers(self) -> None:
        """Choose the buckets that may carry numbers, where tables have fused optimizers."""
        if not any(p.requires_grad and not _is_averaged(p) for p in self._parameters):
            return
        alike = [
            bucket
            for bucket in self._buckets
            if (self._dtype or bucket.parameters[0].dtype) is self.numbers_dtype
        ]
        # In other dtypes they could not be part of one coalesced collective.
        self._carriers = alike[-2:]
        # Only when the engine is done do all ranks agree on the numbers that came.
        for bucket in self._carriers:
            bucket.missing.add(_NUMBERS)
        if are_deferred():
            torch.autograd.Variable._execution_engine.queue_callback(self._numbers_are_there)

    def _numbers_are_there(self) -> None:
        for bucket in self._carriers:
            bucket.missing.discard(_NUMBERS)
        self._reduce_complete()

    def _carries_numbers(self, bucket: _Bucket) -> bool:
        """True if the additional numbers are reduced with ``bucket``."""
        num_bytes = sum(flat.numel() * flat.element_size() for flat, _, _ in self._numbers)
        carriers = self._carriers[-1:] if num_bytes <= _FEW_BYTES else self._carriers[:1]
        return bucket in carriers

    def _reduce(self, bucket: _Bucket) -> None:
        """Start to reduce the gradients of ``bucket``, and the numbers that it carries."""
        numbers = self._numbers if self._carries_numbers(bucket) else ()
        with on_gradient_stream():
            # The spans follow from the flat buffers' layout, which is the same on all ranks. The
            # memory of this rank's gradients may differ from it, so that they are gathered first.
            spans, gradients = joint_spans(bucket.parameters), []
            if spans is not None:
                gather_gradients(bucket.parameters)
            # A rank without a gradient reduces zeros: every rank must send as many elements.
            for parameter in bucket.parameters:
                if parameter.grad is None:
                    slot = slot_of(parameter)
                    zeros = torch.zeros_like(parameter) if slot is None else slot.memory.zero_()
                    parameter.grad = zeros.detach()
            if spans is None:
                gradients = [p.grad for p in bucket.parameters if p.grad is not None]
                memory = torch.cat([gradient.reshape(-1) for gradient in gradients])
                spans = FlatSpans(memory, [(0, memory.numel())])
            self._reduce_tensors(spans, gradients, numbers)

    def _reduce_tensors(
        self, spans: FlatSpans | None, gradients: list[Tensor], numbers: Sequence[Numbers]
    ) -> None:
        started = self._reducer.start(spans, gradients, numbers, len(self._reductions))
        self._reductions.append(started)

    def _finish(self) -> None:
        """Reduce the remaining buckets, and wait for all; at the end of backward."""
        while self._remaining():
            self._reduce(self._remaining()[0])
        if self._numbers and not self._carriers:
            self._reduce_tensors(None, [], self._numbers)
        try:
            for bucket, reduction in itertools.zip_longest(self._buckets, self._reductions):
                with completing([] if bucket is None else bucket.parameters):
                    self._reducer.wait_for(reduction)
            self._average_sparse()
        finally:
            self._clear()
        self._agree_on_order()

    def _average_sparse(self) -> None:
        """Average the sparse gradients, in one order on all ranks."""
        for parameter in self._sparse:
            if parameter.requires_grad and self._is_averaged(parameter):
                average_sparse_gradient(parameter, self._group)

    def _agree_on_order(self) -> None:
        """Order parameters on every rank as the first rank's gradients came in the first backward;
        parameters without one come last."""
        if not self._arrived:
            return
        late = (parameter for parameter in self._order if parameter not in self._arrived)
        in_order = [self._places[p] for p in (*self._arrived, *late)]
        # Gradients may have come in different orders, but ranks must start collectives in one.
        places = torch.tensor(in_order, device="cpu")
        self._arrived = None
        first = dist.get_global_rank(self._group, 0)
        wait_for(dist.broadcast(places, src=first, group=self._group, async_op=True))
        self._order = [self._parameters[place] for place in places.tolist()]

    def _discard(self) -> None:
        """Drop the reductions and buckets that a failed backward has left."""
        for reduction in self._reductions:
            reduction.drop()
        self._clear()

    def _clear(self) -> None:
        self._is_running = False
        self._reductions.clear()
        self._buckets.clear()
        self._bucket_of.clear()
        self._numbers = []
        self._carriers = []


def most_bytes_of_a_bucket(num_elements: Iterable[int], num_numbers: int) -> int:
    """The most bytes of a bucket in float32 within one node, for parameters of ``num_elements``
    each and all ``num_numbers`` additional numbers."""
    return BUCKET_BYTES + 4 * (max(num_elements, default=0) + num_numbers)


def _is_averaged(parameter: Tensor) -> bool:
    """True if no fused optimizer takes the gradient of ``parameter``."""
    table = table_of(parameter)
    return table is None or table.group.rule is None


def _call(method: Callable[[], Callable[[Tensor], None] | None], parameter: Tensor) -> None:
    """Call the method of a weak reference, if its object still lives."""
    found = method()
    if found is not None:
        found(parameter)


def _nothing() -> None:
    return None
