"""One exchange in place of those of several modules of one sharded table, in the stages of a
collection."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchembed.core.features import SparseFeatures
from torchembed.core.function_context import FunctionContext
from torchembed.modules.lookup.joined_lookup import NO_FEATURES, JoinedIds
from torchembed.modules.lookup.lookup_stages import Admitted, Bucketized, LookedUp, Routed
from torchembed.modules.sharded.lookup_of_modules import (
    LookupOfModules,
    LookupSettings,
    ModuleTable,
)
from torchembed.tables import Admission


class ExchangeSlot(NamedTuple):
    """One call of a module in a joined exchange."""

    table: ModuleTable
    num_ids: int
    hotness: int | None
    """Ids of each bag; None where their lengths vary."""
    most_ids: int = 0
    """The most ids of the call on any rank, once these have agreed."""


class ExchangeKind(NamedTuple):
    """The properties that calls must share to be one exchange."""

    settings: LookupSettings
    num_bags: tuple[int, ...]
    """Bags of the call on this rank; once the ranks have agreed, on each of them."""
    is_jagged: bool
    """True for bags between offsets."""

    def joined_lookup(self, slots: Sequence[ExchangeSlot]) -> "JoinedExchange":
        """The exchange of several calls of this kind."""
        return JoinedExchange(self, slots)

    @property
    def num_own_bags(self) -> int:
        """Bags of each call on this rank."""
        own = self.settings.ranks.rank if len(self.num_bags) > 1 else 0
        return self.num_bags[own]


class JoinedExchange:
    """Looks up, in one exchange over the ranks, what several modules of one table are called with.

    It has the stages of a :class:`~torchembed.modules.staged_collection.StagedCollection`, none of
    which waits for a GPU: where lengths vary, every rank sends every rank as many ids as their
    shapes allow at most, spare ones among them. Its vectors are one tensor for each call.

    Args:
        kind: of all calls; every rank has agreed to it.
        slots: the calls; those of one table in the order in which its gradients are added.
    """

    def __init__(self, kind: ExchangeKind, slots: Sequence[ExchangeSlot]) -> None:
        self._kind = kind
        self._lookup = LookupOfModules([slot.table for slot in slots], kind.settings)
        self._keys = tuple(map(str, range(len(slots))))
        self._hotness = None
        if not kind.is_jagged:
            self._hotness = tuple(slot.hotness or 0 for slot in slots)
        self._capacity: Sequence[int] | None = None
        if kind.is_jagged:
            self._capacity = [self._lookup.most_ids_sent([slot.most_ids for slot in slots])]

    def exchange_sizes(self, ids: JoinedIds) -> Bucketized[Any]:
        """The checked ids, by the rank that holds their rows; of this rank alone.

        Raises:
            IndexError: for an id outside its table under ``OnBadId.RAISE``.
        """
        features = SparseFeatures(
            keys=self._keys,
            values=ids.features.values,
            batch_size=self._kind.num_own_bags,
            offsets=ids.offsets,
            hotness=self._hotness,
            weights=ids.features.weights,
        )
        return self._lookup.bucketize(features)

    def route(
        self, bucketized: Bucketized[Any], capacity: Sequence[int] | None = None
    ) -> Routed[Any]:
        """Exchange the ids; pure, collective."""
        routed = self._lookup.route(bucketized, self._capacity)
        return dataclasses.replace(routed, features=NO_FEATURES)

    def admit(self, routed: Routed[Any], admission: Admission | None = None) -> Admitted[Any]:
        """``routed`` with the runs of equal rows that updates need."""
        return self._lookup.admit(routed, admission)

    def release(self, epoch: Tensor) -> None:
        """Let the tables evict the rows of batches admitted in ``epoch``, int64 ``[1]``, and
        before, which were trained. Never waits for a GPU."""
        self._lookup.release(epoch)

    def look_up(self, admitted: Admitted[Any]) -> LookedUp[Any, list[Tensor]]:
        """The vectors of each call, in the order of the slots. Collective.

        Raises:
            RuntimeError: where the tables have been regrouped since the rows were found.
        """
        lookup, dtype = self._lookup, self._kind.settings.dtype
        found, leave_out = lookup.leaving_out(admitted)
        looked_up = lookup.look_up(found)
        assert looked_up.vectors is not None
        columns = _Columns.apply(looked_up.vectors, lookup.widths, dtype, leave_out)
        of_uses = dict(zip(lookup.uses_of_slots, columns, strict=True))
        ready = None
        if looked_up.vectors.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        vectors = [of_uses[number] for number in range(len(of_uses))]
        return LookedUp(admitted.features, admitted.rows, vectors, ready)


class _Columns(torch.autograd.Function):
    """Columns of ``vectors [B, columns]``, one after the other, as contiguous tensors.

    They are no views to autograd, which would refuse writing to them in place.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext,
        vectors: Tensor,
        widths: Sequence[int],
        dtype: torch.dtype,
        leave_out: Callable[[Iterable[int]], None],
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.widths, ctx.dtype, ctx.leave_out = widths, vectors.dtype, leave_out
        num_bags, is_even = vectors.shape[0], len(set(widths)) == 1
        if not is_even:
            parts = vectors.split(list(widths), dim=1)
            return tuple(part.to(dtype, copy=True).contiguous() for part in parts)
        columns = vectors.new_empty(len(widths), num_bags, widths[0], dtype=dtype)
        columns.copy_(vectors.view(num_bags, len(widths), widths[0]).transpose(0, 1))
        results, size = [], num_bags * widths[0]
        for number, width in enumerate(widths):
            part = columns.new_empty(0)
            part.set_(columns.untyped_storage(), number * size, (num_bags, width), (width, 1))
            results.append(part)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, *grads: Tensor | None) -> tuple[Any, ...]:
        like = next((grad for grad in grads if grad is not None), None)
        if like is None:
            return None, None, None, None
        # As where each call is looked up by itself, those that nobody needs train nothing.
        ctx.leave_out(number for number, grad in enumerate(grads) if grad is None)
        pairs = zip(grads, ctx.widths, strict=True)
        parts = [
            like.new_zeros(like.shape[0], width) if grad is None else grad for grad, width in pairs
        ]
        return torch.cat(parts, dim=1).to(ctx.dtype), None, None, None
