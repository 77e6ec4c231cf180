"""One lookup in place of those of several modules of one table, in the stages of a collection."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchembed.core.features import SparseFeatures
from torchembed.core.function_context import FunctionContext
from torchembed.core.stand_ins import KeptTensors
from torchembed.core.types import OnBadId, Pooling
from torchembed.modules.lookup.bad_ids import BadIdReport
from torchembed.modules.lookup.bad_ids_of_slots import SlotName, submit_bad_id
from torchembed.modules.lookup.fetched_rows import fetch_refused, fetch_rows
from torchembed.modules.lookup.group_rows import Ids
from torchembed.modules.lookup.lookup_stages import Admitted, Bucketized, LookedUp, Routed
from torchembed.modules.lookup.table_lookup import look_up, look_up_pooled
from torchembed.ops.pooled_lookup import fixed_gradient_map
from torchembed.ops.row_gradients import WeightGradient
from torchembed.ops.rowwise_update import RowGradients
from torchembed.ops.segments import Runs, find_runs
from torchembed.tables import (
    Admission,
    FetchedRows,
    JoinedGroup,
    MissingVectors,
    Table,
    TableGroup,
    TieredGroup,
)

T = TypeVar("T")


class JoinedSlot(NamedTuple):
    """One call of a module in a joined lookup."""

    table: Table
    num_ids: int
    num_bags: int
    """Bags that the call pools; without pooling, as many as ids."""
    shape: tuple[int, ...]
    """Shape of the result."""
    padding_idx: int | None


class LookupKind(NamedTuple):
    """The properties that calls must share to be looked up in one."""

    group: TableGroup
    """The group that one update trains, and one lookup reads."""
    pooling: Pooling | None
    """None for a vector for each id."""
    on_bad_id: OnBadId
    is_jagged: bool
    """True for bags between offsets."""

    def joined_lookup(self, slots: "Sequence[JoinedSlot]") -> "JoinedLookup":
        """The lookup of several calls of this kind."""
        return JoinedLookup(self, slots)


class JoinedIds(NamedTuple):
    """The ids of all calls, one after the other."""

    features: SparseFeatures
    """A feature for each call, of one bag."""
    offsets: Tensor | None
    """Bounds of the bags of all calls; None where lengths are fixed."""


class JoinedRows(NamedTuple):
    """Rows of a joined lookup's group, and what pools them."""

    rows: Tensor
    """``[L]``, as the lookup reads them; of a dynamic table any numbers until admission."""
    trained_rows: Tensor
    """``[L]``: as the update takes them, -1 for padding."""
    runs: Runs | None
    """Runs of equal ``trained_rows``."""
    offsets: Tensor | None
    weights: Tensor | None
    ids: Ids | None = None
    """Kept for an index that admission changes, until then."""
    missing_ids: Ids | None = None
    """The ids, where those without a row are looked up as other values than zeros."""
    fetched: FetchedRows | None = None
    """The rows that were brought to the device, of a group that lives elsewhere; None: none."""


class JoinedLookup:
    """Looks up, in one call, what several modules of one table are called with.

    It has the stages of a :class:`~torchembed.modules.staged_collection.StagedCollection`, on one
    rank. Its vectors are one tensor for each call.

    Args:
        kind: of all calls.
        slots: the calls; those of one table in the order in which its gradients are added.
    """

    def __init__(self, kind: LookupKind, slots: Sequence[JoinedSlot]) -> None:
        self._kind, self._slots = kind, list(slots)
        group = kind.group
        tables = [group.tables.index(slot.table) for slot in slots]
        self._index = group.index.for_tables(tables)
        self._padding = [
            -2 if slot.padding_idx is None else group.first_rows[number] + slot.padding_idx
            for slot, number in zip(slots, tables, strict=True)
        ]
        """For each call the row of the group that is padding, or, of a dynamic table, the id; -2
        for none of a static table."""
        self._is_dynamic = group.index.changes_on_admission
        if self._is_dynamic:
            self._padding = [slot.padding_idx or 0 for slot in slots]
        self._names = [SlotName(s.table.spec.name, "input", s.table.num_rows) for s in slots]
        self._bad_ids = BadIdReport()
        self._constants: KeptTensors[str, Any] = KeptTensors()
        """Constants that follow from the calls' shapes; kept, since captured steps read them."""

    def exchange_sizes(self, ids: JoinedIds) -> Bucketized[JoinedIds]:
        """``ids`` as they are: on one rank nothing is exchanged."""
        return Bucketized(NO_FEATURES, ids)

    def route(
        self, bucketized: Bucketized[JoinedIds], capacity: Sequence[int] | None = None
    ) -> Routed[JoinedRows]:
        """The rows of the ids; pure.

        Raises:
            IndexError: for an id outside its table under ``OnBadId.RAISE``.
        """
        features, offsets = bucketized.ids
        if self._is_dynamic:
            return self._route_dynamic(features, offsets)
        group, on_bad_id = self._kind.group, self._kind.on_bad_id
        with torch.no_grad():
            rows, first_bad = self._index.route(features, on_bad_id, group.rows_dtype)
            if on_bad_id is OnBadId.RAISE:
                submit_bad_id(features, first_bad, self._names, self._bad_ids)
            trained = rows
            if any(row >= 0 for row in self._padding):
                padding = self._constant("padding", lambda: self._padding_rows(rows))
                trained = rows.masked_fill(rows == padding, -1)
        # The vector of padding is its row, but no part of what is pooled.
        rows = rows if self._kind.pooling is None else trained
        return Routed(NO_FEATURES, JoinedRows(rows, trained, None, offsets, features.weights))

    def _route_dynamic(
        self, features: SparseFeatures, offsets: Tensor | None
    ) -> Routed[JoinedRows]:
        """:meth:`route` where no id is bad, and padding is an id, which has no row: admission finds
        the rows."""
        values = features.values
        with torch.no_grad():
            ids = Ids(features, self._are_ids(values, offsets))
        looked_up = ids if self._kind.group.reads_missing else None
        rows = JoinedRows(values, values, None, offsets, features.weights, ids, looked_up)
        return Routed(NO_FEATURES, rows)

    def _are_ids(self, values: Tensor, offsets: Tensor | None) -> Tensor | None:
        """False, bool ``[L]``, for padding and for spare ids behind the last bag; None where there
        is neither."""
        is_id = None
        if any(slot.padding_idx is not None for slot in self._slots):
            padding = self._constant("padding", lambda: self._padding_rows(values))
            is_id = values != padding
            if any(slot.padding_idx is None for slot in self._slots):
                is_id |= self._constant("no padding", lambda: self._have_no_padding(values))
        if offsets is not None:
            is_in_bag = torch.arange(values.numel(), device=values.device) < offsets[-1]
            is_id = is_in_bag if is_id is None else is_id & is_in_bag
        return is_id

    def _have_no_padding(self, values: Tensor) -> Tensor:
        """True, bool ``[L]``, for ids of calls without a padding id."""
        parts = [
            torch.full((slot.num_ids,), slot.padding_idx is None, device=values.device)
            for slot in self._slots
        ]
        return torch.cat(parts)

    def admit(
        self, routed: Routed[JoinedRows], admission: Admission | None = None
    ) -> Admitted[JoinedRows]:
        """``routed`` with its rows in the tables, and the runs of equal rows that the update
        needs; once for each batch that is trained where that changes tables."""
        group, rows = self._kind.group, routed.ids
        with torch.no_grad():
            if rows.ids is not None:
                features, is_id = rows.ids
                found = group.admit(self._index, features, None, is_id, admission)
                rows = rows._replace(rows=found, trained_rows=found, ids=None)
            runs, fetched = find_runs(rows.trained_rows, group.num_rows), None
            if isinstance(group, TieredGroup):
                known = runs if rows.rows is rows.trained_rows else None
                fetched = fetch_rows(group, rows.rows, known, admission, self._bad_ids)
        return Admitted(routed.features, rows._replace(runs=runs, fetched=fetched))

    def release(self, epoch: Tensor) -> None:
        """Let the table evict the rows of batches admitted in ``epoch``, int64 ``[1]``, and before,
        which were trained. Never waits for a GPU."""
        self._kind.group.release(epoch)

    def look_up(self, admitted: Admitted[JoinedRows]) -> LookedUp[JoinedRows, list[Tensor]]:
        """The result of each call, in the order of the slots.

        Raises:
            RuntimeError: where the tables have been regrouped since the rows were found, or rows
                find no place on the device.
        """
        rows, kind = admitted.rows, self._kind
        if isinstance(kind.group, TieredGroup) and rows.fetched is not None:
            fetch_refused(kind.group, rows.fetched, self._bad_ids)
        sink = _Sink(kind.group, rows, self._slots)
        if kind.pooling is None:
            vectors = look_up(
                kind.group,
                rows.rows,
                sink=sink,
                output_dtype=None,
                weight_form=WeightGradient.DENSE,
                missing=self._missing(rows),
                fetched=rows.fetched,
            )
        else:
            vectors = self._pooled(rows, kind.pooling, sink)
        results = list(_Split.apply(vectors, [slot.shape for slot in self._slots], sink))
        ready = None
        if vectors.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        return LookedUp(admitted.features, rows, results, ready)

    def _pooled(self, rows: JoinedRows, pooling: Pooling, sink: "_Sink") -> Tensor:
        """``[bags of all calls, D]``: as bags of one feature, so that those of a call follow one
        another."""
        num_bags = sum(slot.num_bags for slot in self._slots)
        lengths = [slot.num_ids // slot.num_bags for slot in self._slots]
        offsets, hotness, known_map = rows.offsets, None, None
        if offsets is None and len(set(lengths)) == 1:
            hotness = lengths[:1]
            find = functools.partial(
                fixed_gradient_map,
                rows.rows,
                hotness=lengths[:1],
                batch_size=num_bags,
                pooling=pooling,
            )
            known_map = self._constant("map", find) if rows.weights is None else None
        elif offsets is None:
            offsets = self._constant("offsets", lambda: self._bounds_of_bags(lengths, rows.rows))
        return look_up_pooled(
            self._kind.group,
            rows.rows,
            offsets=offsets,
            hotness=hotness,
            batch_size=num_bags,
            num_features=1,
            per_id_weights=rows.weights,
            pooling=pooling,
            sink=sink,
            output_dtype=self._kind.group.weight.dtype,
            weight_form=WeightGradient.DENSE,
            known_map=known_map,
            missing=self._missing(rows),
            fetched=rows.fetched,
        ).squeeze(1)

    def _missing(self, rows: JoinedRows) -> MissingVectors | None:
        """The vectors of ids that have no row; None where they are zeros."""
        if rows.missing_ids is None:
            return None
        features, is_id = rows.missing_ids
        return self._kind.group.missing_vectors(self._index, features, rows.rows, is_id)

    def _constant(self, name: str, make: Callable[[], T]) -> T:
        is_cuda = self._kind.group.weight.is_cuda
        if name not in self._constants and is_cuda and torch.cuda.is_current_stream_capturing():
            return make()  # in the graph's memory, which a later step may not read
        return self._constants.get(name, make)

    def _padding_rows(self, rows: Tensor) -> Tensor:
        """The padding row of each id's call."""
        # Filled on the device: a copy from the host would wait for a GPU.
        pairs = zip(self._padding, self._slots, strict=True)
        return torch.cat([rows.new_full((slot.num_ids,), row) for row, slot in pairs])

    def _bounds_of_bags(self, lengths: Sequence[int], rows: Tensor) -> Tensor:
        """Offsets ``[bags of all calls + 1]`` of bags of ``lengths`` ids, one for each call."""
        pairs = zip(lengths, self._slots, strict=True)
        sizes = [rows.new_full((slot.num_bags,), length) for length, slot in pairs]
        return torch.cat([rows.new_zeros(1), *sizes]).cumsum(0)


NO_FEATURES = SparseFeatures(
    keys=(), values=torch.empty(0, dtype=torch.int64, device="cpu"), batch_size=0, hotness=()
)
"""A batch without features, in place of the one that a collection recognizes."""


class _Sink:
    """Gives the gradients of a joined lookup's rows to the group that one update trains."""

    def __init__(self, group: TableGroup, rows: JoinedRows, slots: Sequence[JoinedSlot]) -> None:
        if any((slot.table.group.joined or slot.table.group) is not group for slot in slots):
            raise RuntimeError(
                "tables were regrouped between prepare and forward, by an optimizer, a load or "
                "requires_grad_; prepare the batch again"
            )
        self._group, self._rows, self._slots = group, rows, slots
        self.without_gradient: set[int] = set()
        """The calls on whose results the loss does not depend, of this backward."""

    def __call__(self, _: Tensor, gradients: RowGradients) -> None:
        rows, runs, slots = self._rows.trained_rows, self._rows.runs, list(self._slots)
        if self.without_gradient:
            # As where each call is looked up by itself, they train nothing.
            runs, pieces = None, list(rows.split([slot.num_ids for slot in slots]))
            for number in self.without_gradient:
                pieces[number] = torch.full_like(pieces[number], -1)
            rows = torch.cat(pieces)
            slots = [s for n, s in enumerate(slots) if n not in self.without_gradient]
        if isinstance(self._group, JoinedGroup):
            self._group.record_of([slot.table.group for slot in slots], rows, gradients, runs)
        elif slots:
            self._group.record(rows, gradients, runs)


class _Split(torch.autograd.Function):
    """The parts of ``[L, D]``, one after the other, as tensors of their own over its memory.

    They are no views to autograd, which would refuse writing to them in place.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext, vectors: Tensor, shapes: Sequence[tuple[int, ...]], sink: _Sink
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shapes, ctx.sink = shapes, sink
        results, first = [], int(vectors.storage_offset())
        for shape in shapes:
            strides = torch.empty(shape, device="meta").stride()
            part = vectors.new_empty(0)
            results.append(part.set_(vectors.untyped_storage(), first, shape, strides))
            first += part.numel()
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, *grads: Tensor | None) -> tuple[Any, ...]:
        missing = {number for number, grad in enumerate(grads) if grad is None}
        ctx.sink.without_gradient = missing
        like = next((grad for grad in grads if grad is not None), None)
        if like is None:
            return None, None, None
        pieces = [
            like.new_zeros(shape) if grad is None else grad
            for grad, shape in zip(grads, ctx.shapes, strict=True)
        ]
        return torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces]), None, None
