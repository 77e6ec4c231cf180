"""Calls of modules of one table that are looked up together, ahead of the model's forward."""

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from torchembed.core.checks import as_signed
from torchembed.core.features import SparseFeatures
from torchembed.core.stand_ins import KeptTensors
from torchembed.core.trees import Tree, tensors_in
from torchembed.modules.calls_ahead import (
    CallArguments,
    CallHandler,
    CallKind,
    CallPlaces,
    CallSlot,
    KnownTensors,
    ModuleOfOneTable,
    TensorPlace,
    places_of,
)
from torchembed.modules.lookup.bad_ids import check_offsets
from torchembed.modules.lookup.joined_lookup import JoinedIds
from torchembed.modules.lookup.lookup_stages import Bucketized, LookedUp
from torchembed.modules.sharded.joined_exchange import JoinedExchange
from torchembed.step.batches.batch_layout import with_sparse_features
from torchembed.step.joined_calls_on_ranks import agreed_calls


class ObservedCall(NamedTuple):
    """A call of a module with views of a batch's tensors."""

    module: ModuleOfOneTable
    places: CallPlaces
    dtypes: tuple[torch.dtype | None, ...]
    kind: CallKind
    slot: CallSlot


class JoinedCall:
    """Calls of several modules in the model's forward, with views of the batch's tensors, in place
    of which one lookup is done.

    Attributes:
        collection: does the stages of the lookup.
    """

    def __init__(self, calls: Sequence[ObservedCall]) -> None:
        # Gradients of one table's calls are added as where each call records its own: backward
        # comes to the last call first.
        self._calls = list(reversed(calls))
        kind = calls[0].kind
        self.collection = kind.joined_lookup([call.slot for call in self._calls])
        self._is_jagged = kind.is_jagged
        self._constants: KeptTensors[str, Tensor] = KeptTensors()

    @property
    def modules(self) -> list[ModuleOfOneTable]:
        """The modules, some perhaps more than once."""
        return [call.module for call in self._calls]

    @property
    def is_current(self) -> bool:
        """True where tables are updated together as when the calls were joined, and train as
        then."""
        first, *others = self._calls
        return first.module.is_current(first.kind) and all(
            call.module.current_kind(call.kind) == call.kind for call in others
        )

    @property
    def sends_spare_ids(self) -> bool:
        """True if ids are exchanged whose number varies, among as many as shapes allow."""
        return self._is_jagged and isinstance(self.collection, JoinedExchange)

    def exchange_sizes(self, batch: Tree) -> Bucketized[JoinedIds]:
        """The first stage of the lookup for a batch of the layout."""
        return self.collection.exchange_sizes(self.ids_of(batch))

    def ids_of(self, batch: Tree) -> JoinedIds:
        """The ids of all calls for a batch of the layout.

        Raises:
            ValueError: on a CPU, for offsets outside the ids.
        """
        tensors = tensors_in(with_sparse_features(batch))
        num_ids = [call.slot.num_ids for call in self._calls]
        values = self._gathered("ids", tensors, [call.places.input for call in self._calls])
        of_weights = [call.places.per_sample_weights for call in self._calls]
        weighted = [place for place in of_weights if place is not None]
        weights = self._gathered("weights", tensors, weighted) if weighted else None
        counts = [call.places.count for call in self._calls]
        counted = [place.of(tensors) for place in counts if place is not None]
        if counted:
            return self._counted(tensors, torch.cat(counted), num_ids, values, weights)
        features = SparseFeatures(
            keys=tuple(map(str, range(len(num_ids)))),
            values=values,
            batch_size=1,
            hotness=tuple(num_ids),
            weights=weights,
        )
        return JoinedIds(features, self._offsets(tensors, num_ids))

    def _counted(
        self,
        tensors: Sequence[Tensor],
        counts: Tensor,
        num_ids: Sequence[int],
        values: Tensor,
        weights: Tensor | None,
    ) -> JoinedIds:
        """The ids of all calls where only the first ``counts`` of each are the batch's: these come
        first, and all spare ones behind the last bag."""
        ends = counts.cumsum(0)
        begins = torch.cat([ends - counts, ends[-1:]])

        def firsts() -> Tensor:
            sizes = [counts.new_full((1,), size) for size in (0, *num_ids[:-1])]
            return torch.cat(sizes).cumsum(0)

        is_cuda = counts.is_cuda
        positions = torch.arange(values.numel(), device=values.device)
        of_call = torch.searchsorted(ends, positions, right=True).clamp_max(len(num_ids) - 1)
        shift = self._constant("firsts", firsts, is_cuda=is_cuda) - begins[:-1]
        sources = (positions + shift[of_call]).clamp_max(values.numel() - 1)
        features = SparseFeatures(
            keys=tuple(map(str, range(len(num_ids)))),
            values=values[sources],
            batch_size=1,
            hotness=tuple(num_ids),
            weights=None if weights is None else weights[sources],
        )
        given = [p.of(tensors) for call in self._calls if (p := call.places.offsets) is not None]
        shifted = [o + begin.to(o.dtype) for o, begin in zip(given, begins, strict=False)]
        return JoinedIds(features, torch.cat([*shifted, begins[-1:].to(given[0].dtype)]))

    def _gathered(
        self, name: str, tensors: Sequence[Tensor], places: Sequence[TensorPlace]
    ) -> Tensor:
        """The elements at ``places``, one after the other; int64 where they are unsigned."""
        numbers = {place.number for place in places}
        if len(numbers) > 1:
            return torch.cat([as_signed(place.of(tensors)).reshape(-1) for place in places])
        source = tensors[numbers.pop()]
        size = source.untyped_storage().nbytes() // source.element_size()
        flat = as_signed(source.as_strided((size,), (1,), 0))

        def index() -> Tensor:
            elements = torch.arange(size, device=flat.device)
            return torch.cat([p._replace(number=0).of([elements]).reshape(-1) for p in places])

        # One gather, where torch.cat would copy each of many small strided views by itself.
        return flat.index_select(0, self._constant(name, index, is_cuda=flat.is_cuda))

    def _offsets(self, tensors: Sequence[Tensor], num_ids: Sequence[int]) -> Tensor | None:
        """Bounds of the bags of all calls; None where lengths are fixed."""
        if not self._is_jagged:
            return None
        places = [call.places.offsets for call in self._calls]
        given = [place.of(tensors) for place in places if place is not None]
        for offsets, count in zip(given, num_ids, strict=True):
            check_offsets(torch.cat([offsets, offsets.new_full((1,), count)]), count)

        def shifts() -> Tensor:
            firsts = [sum(num_ids[:number]) for number in range(len(num_ids))]
            filled = [o.new_full((o.numel(),), f) for o, f in zip(given, firsts, strict=True)]
            return torch.cat([*filled, given[0].new_full((1,), sum(num_ids))])

        ends = torch.cat([*given, given[0].new_zeros(1)])
        return ends + self._constant("shifts", shifts, is_cuda=ends.is_cuda)

    def _constant(self, name: str, make: Callable[[], Tensor], *, is_cuda: bool) -> Tensor:
        if name not in self._constants and is_cuda and torch.cuda.is_current_stream_capturing():
            return make()  # in the graph's memory, which a later step may not read
        return self._constants.get(name, make)

    def results(self, looked_up: LookedUp) -> "Iterator[tuple[_Key, _Result]]":
        """The result of each call, in the order of the calls."""
        assert looked_up.vectors is not None
        results = [_Result(vectors, looked_up.ready) for vectors in looked_up.vectors]
        keys = [(id(call.module), call.places) for call in self._calls]
        yield from reversed(list(zip(keys, results, strict=True)))


_Key: TypeAlias = tuple[int, CallPlaces]
"""A module, by identity, and its arguments."""


class _Result(NamedTuple):
    """The result of a call that was looked up before it."""

    vectors: Tensor
    ready: torch.cuda.Event | None

    def take(self) -> Tensor:
        """The vectors, for the current stream."""
        if self.ready is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.ready)
            self.vectors.record_stream(stream)
        # They carry a gradient also where the model calls forward under ``no_grad``.
        return self.vectors if torch.is_grad_enabled() else self.vectors.detach()


@contextlib.contextmanager
def observed_joined_calls(model: nn.Module, batch: Tree) -> Iterator[list[JoinedCall]]:
    """The calls within it that can be looked up together, of modules whose arguments are views of
    the tensors of ``batch``; in the list once it has ended.

    A view is the same part of each batch in a step that is repeated. A copy may hold anything.
    Collective where modules are sharded: their calls are joined as all ranks can.
    """
    known = KnownTensors(tensors_in(with_sparse_features(batch)))
    noted: list[ObservedCall] = []
    modules = [module for module in model.modules() if isinstance(module, ModuleOfOneTable)]

    def note(module: ModuleOfOneTable, arguments: CallArguments) -> None:
        places, found = places_of(arguments, known), module.joined_slot(arguments)
        if places is not None and found is not None:
            dtypes = tuple(None if tensor is None else tensor.dtype for tensor in arguments)
            noted.append(ObservedCall(module, places, dtypes, *found))

    joined: list[JoinedCall] = []
    with _handled_by(modules, note):
        yield joined
    # Only now: the step's update may have parted tables that are not trained together.
    alike: dict[object, list[ObservedCall]] = {}
    for call in agreed_calls(noted, modules):
        now = call._replace(kind=call.module.current_kind(call.kind))
        alike.setdefault((now.kind, now.dtypes), []).append(now)
    joined += map(JoinedCall, alike.values())


@contextlib.contextmanager
def answered(
    calls: Sequence[JoinedCall], looked_up: Sequence[LookedUp], batch: Tree
) -> Iterator[None]:
    """Within it, modules return what was looked up ahead for their calls with ``batch``."""
    if not calls:
        yield
        return
    known = KnownTensors(tensors_in(with_sparse_features(batch)))
    results: dict[_Key, collections.deque[_Result]] = collections.defaultdict(collections.deque)
    for call, of_call in zip(calls, looked_up, strict=True):
        for key, result in call.results(of_call):
            results[key].append(result)

    def answer(module: ModuleOfOneTable, arguments: CallArguments) -> Tensor | None:
        places = places_of(arguments, known)
        # A module that is called again with the same ids looks them up again.
        left = None if places is None else results.get((id(module), places))
        return left.popleft().take() if left else None

    with _handled_by([module for call in calls for module in call.modules], answer):
        yield


@contextlib.contextmanager
def _handled_by(
    modules: Sequence[ModuleOfOneTable],
    handler: CallHandler,
) -> Iterator[None]:
    for module in modules:
        module.calls_ahead = handler
    try:
        yield
    finally:
        for module in modules:
            module.calls_ahead = None
