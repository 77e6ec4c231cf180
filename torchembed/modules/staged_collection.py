"""Collections whose forward runs in stages, so that a pipeline can begin it ahead of the model.

A batch passes five stages: its ids are bucketized by the rank that holds their rows, the sizes of
the exchange become known, the ids are exchanged (routed), their rows are admitted to the tables,
and the rows are looked up. Only the last stage reads weights.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Generic

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.core.features import SparseFeatures, as_sparse_features
from torchembed.core.mixed_features import MixedFeatures
from torchembed.core.trees import Tree, map_tensors, tensors_in
from torchembed.modules.configs import EmbeddingConfig
from torchembed.modules.lookup.awaited_admission import awaited_admission
from torchembed.modules.lookup.forward_admission import admission_in_forward, admits_in_forward
from torchembed.modules.lookup.lookup_stages import (
    Admitted,
    B,
    Bucketized,
    LookedUp,
    R,
    Routed,
    V,
)
from torchembed.modules.table_module import TableModule
from torchembed.tables import Admission


class _Reusable(Generic[R, V]):
    """Vectors that forward is to return for a batch, and whether it has done so."""

    def __init__(self, looked_up: LookedUp[R, V]) -> None:
        self.looked_up = looked_up
        self.was_returned = False


class StagedCollection(TableModule, Generic[B, R, V]):
    """A collection that can do the stages of ``forward`` before the model calls it.

    ``module(features)`` does all of them. A pipeline calls :meth:`prepare` a step ahead,
    :meth:`look_up` before the model's forward and :meth:`reusing` around it: the collection then
    recognizes the batch by its tensors, however the model passed them on. Where lengths vary, a
    thread that may wait calls :meth:`exchange_sizes` first, and the step :meth:`route` and
    :meth:`admit`.
    """

    is_pooled = True
    """True if the result has one shape for all batches of as many samples."""
    reserved_columns: int = 0
    """Columns in memory before the pooled vectors; :class:`~torchembed.EmbeddingBagCollection`
    says what they are for."""

    _configs: list[EmbeddingConfig]
    _output_dtype: torch.dtype
    _casts_vectors = False
    """True if what casts the module also casts the vectors that it gives."""

    _reusable: "Sequence[_Reusable[R, V]]" = ()
    slots_of_whole: Sequence[int] = ()
    """The slots of :attr:`whole` that this one looks up, where it is another one."""

    @property
    def features_of_tables(self) -> dict[str, tuple[str, ...]]:
        """The features that look up each table, by its name; the same on all ranks."""
        return {config.name: tuple(config.feature_names) for config in self._configs}

    def __init__(self) -> None:
        super().__init__()
        self._subsets: dict[tuple[int, ...], StagedCollection[B, R, V]] = {}

    @property
    def whole(self) -> "StagedCollection[B, R, V]":
        """The collection of the model that this one looks up some slots of; itself by default."""
        return vars(self).get("_whole", self)

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> "StagedCollection[B, R, V]":
        super()._apply(fn, recurse)
        self._subsets.clear()
        if self._casts_vectors:
            like = torch.empty(0, dtype=self._output_dtype, device="cpu")
            self._set_output_dtype(fn(like).dtype)
        return self

    def _set_output_dtype(self, dtype: torch.dtype) -> None:
        self._output_dtype = dtype

    @property
    def always_waits_for_sizes(self) -> bool:
        """True if :meth:`exchange_sizes` waits also where hotness is fixed."""
        return False

    def bucketize(self, features: Tree) -> Bucketized[B]:
        """Check the ids of ``features`` and sort them by the rank that holds their rows.

        Waits for nothing and is of this rank alone. All shapes follow from those of ``features``.

        Raises:
            IndexError, ValueError, TypeError: as ``forward`` would.
        """
        batch = as_sparse_features(features)
        with torch.no_grad():
            return Bucketized(batch, self._bucketize(batch))

    def exchange_sizes(self, features: Tree) -> Bucketized[B]:
        """:meth:`bucketize`, and find out how many ids will be exchanged.

        May wait: for this rank's sizes from its GPU, and for those of the others through the CPU.
        No id is sent. For a thread of its own, one in each process: every rank exchanges the sizes
        of the same batches in the same order.

        Raises:
            IndexError, ValueError, TypeError: as ``forward`` would.
        """
        batch = as_sparse_features(features)
        with torch.no_grad():
            return Bucketized(batch, self._exchange_sizes(batch, ahead=True))

    def needed_capacity(self, bucketized: Bucketized[B]) -> Tensor | None:
        """The capacity that :meth:`route` must be given for what was bucketized, an integer tensor
        ``[n]`` on the device; None where it needs none."""
        with torch.no_grad():
            return self._needed_capacity(bucketized.ids)

    def agreed_capacity(self, needed: Sequence[int]) -> list[int]:
        """The largest of each number of ``needed`` over all ranks; for the thread of
        :meth:`exchange_sizes`, in the same order on every rank."""
        return list(needed)

    def route(self, bucketized: Bucketized[B], capacity: Sequence[int] | None = None) -> Routed[R]:
        """Exchange the ids; pure: no table changes, and stale ids may be routed again. The rows of
        dynamic tables are left to :meth:`admit`.

        Never waits for a GPU. Collective where the tables are sharded: every rank routes its
        batches in the same order, between the same forwards.

        Args:
            capacity: for what was bucketized without an exchange of sizes: the numbers of ids that
                there is room for, no fewer than :meth:`needed_capacity` says on any rank, the same
                on all. How many ids each rank sends to each and, where a vector is looked up for
                each id, how many each feature has.
        """
        with torch.no_grad(), awaited_admission():
            return Routed(bucketized.features, self._route(bucketized.ids, capacity))

    def admit(self, routed: Routed[R], admission: Admission | None = None) -> Admitted[R]:
        """Give the ids their rows, and find the runs of equal rows for fused optimizers.

        Once for each batch that is trained, after it is known whether its ids are valid.

        Args:
            admission: whether the batch will be trained, and its epoch; None for one that will, and
                before which no other one is admitted.
        """
        if not self.training:
            admission = (admission or Admission())._replace(inserts=False)
        with torch.no_grad():
            return Admitted(routed.features, self._admit(routed.ids, admission, finds_runs=True))

    def release(self, epoch: Tensor) -> None:
        """Let tables evict the rows of batches admitted in ``epoch``, int64 ``[1]``, and before,
        which were trained. Never waits for a GPU."""
        for group in self._table_set.current_groups():
            group.release(epoch)

    def prepare(self, features: Tree) -> Admitted[R]:
        """All stages of a batch that depend on its ids alone.

        Never waits for a GPU where hotness is fixed. Collective as :meth:`route`.

        Raises:
            IndexError, ValueError, TypeError: as ``forward`` would.
        """
        batch = as_sparse_features(features)
        with torch.no_grad():
            bucketized = Bucketized(batch, self._exchange_sizes(batch, ahead=False))
        return self.admit(self.route(bucketized))

    def look_up(self, admitted: Admitted[R]) -> LookedUp[R, V]:
        """The vectors of a batch, which ``forward`` then returns without a second lookup.

        On a stream of its own it runs concurrently with what the model does before it needs the
        vectors, and so does its backward.
        """
        self._fetch_refused(admitted.rows)
        self._submit_fetch()
        vectors = self._look_up(admitted.rows, ahead=True)
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        return LookedUp(admitted.features, admitted.rows, vectors, ready)

    @contextlib.contextmanager
    def reusing(self, looked_up: Sequence[LookedUp[R, V]]) -> Iterator[None]:
        """Within it, ``forward`` uses what was found of a batch ahead.

        A batch is recognized where its tensors are the same objects, and keys, batch size and
        hotness are equal. Others are looked up as ever, and so are the rows of one that is given
        more often than it was looked up.
        """
        before, self._reusable = self._reusable, [_Reusable(one) for one in looked_up]
        try:
            yield
        finally:
            self._reusable = before

    def divided(self, features: Tree) -> "list[tuple[StagedCollection[B, R, V], SparseFeatures]]":
        """The lookups that ``forward`` does for ``features``: one of this collection, or, where it
        takes features of several parts of :class:`~torchembed.MixedFeatures`, one of each part.

        Raises:
            TypeError, ValueError: for features that are none, or lack one.
        """
        if not isinstance(features, MixedFeatures):
            return [(self, as_sparse_features(features))]
        of_slots = self._features_of_slots()
        parts = features.parts_with(set(of_slots))
        if len(parts) == 1:
            return [(self, parts[0])]
        slots = [tuple(s for s, key in enumerate(of_slots) if key in part.keys) for part in parts]
        return [(self._for_slots(of), part) for of, part in zip(slots, parts, strict=True)]

    def _for_slots(self, slots: tuple[int, ...]) -> "StagedCollection[B, R, V]":
        """A collection over the same tables that looks up some of the slots, one for each way to
        divide them."""
        made = self._subsets.get(slots)
        if made is None:
            made = copy.copy(self)
            made.reserved_columns, made._reusable, made._subsets = 0, (), {}
            # Not by setattr, which would make this collection a child of its own.
            vars(made)["_whole"], made.slots_of_whole = self, list(slots)
            made._take_slots(slots)
            self._subsets[slots] = made
        made._output_dtype, made.training = self._output_dtype, self.training
        return made

    def _take_slots(self, slots: tuple[int, ...]) -> None:
        """Look up those slots alone from now on."""
        raise NotImplementedError

    def _features_of_slots(self) -> list[str]:
        """For each slot its feature."""
        raise NotImplementedError

    def _in_order(self, parts: list[tuple[Sequence[int], V]]) -> V:
        """The vectors of all slots from those of parts, each after the numbers of its slots."""
        raise NotImplementedError

    def forward(self, features: Tree) -> Tree:
        lookups = self.divided(features)
        found = [(of.slots_of_whole, of._forward_vectors(batch)) for of, batch in lookups]
        if lookups[0][0] is self:
            return self._result(features, found[0][1])
        return self._result(features, self._in_order(found))

    def _forward_vectors(self, batch: SparseFeatures) -> V:
        """The vectors of ``batch``, of which some may be known."""
        known = [r for r in self._reusable if is_same_batch(r.looked_up.features, batch)]
        if known:
            reusable = next((r for r in known if not r.was_returned), known[0])
            return self._vectors_of(reusable)
        # What is only evaluated changes no table.
        admits = admits_in_forward(self) and self.admission_changes_tables
        if admits:
            self._grow_in_forward()
        with awaited_admission() if admits else contextlib.nullcontext():
            ids = self._route(self._exchange_sizes(batch, ahead=False), None)
        if admits:
            admission = admission_in_forward(self._admission_group)
            ids = self._admit(ids, admission, finds_runs=False)
            self._submit_fetch()
        return self._look_up(ids, ahead=False)

    @property
    def _admission_group(self) -> dist.ProcessGroup | None:
        """The ranks that admit the ids of a forward together; None for one."""
        return None

    def _vectors_of(self, reusable: _Reusable[R, V]) -> V:
        looked_up = reusable.looked_up
        if looked_up.vectors is None or reusable.was_returned:
            # Each call gives the tables gradients of its own, as without a lookup ahead.
            return self._look_up(looked_up.rows, ahead=False)
        if looked_up.ready is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(looked_up.ready)
            for tensor in tensors_in(looked_up.vectors):
                tensor.record_stream(stream)
        vectors = looked_up.vectors
        reusable.was_returned = True
        # The vectors carry a gradient also where the model calls forward under ``no_grad``.
        return vectors if torch.is_grad_enabled() else map_tensors(Tensor.detach, vectors)

    @property
    def device(self) -> torch.device:
        """The device of the tables."""
        raise NotImplementedError

    def _bucketize(self, features: SparseFeatures) -> B:
        """:meth:`bucketize` of this collection."""
        return self._exchange_sizes(features, ahead=True)

    def _exchange_sizes(self, features: SparseFeatures, *, ahead: bool) -> B:
        """:meth:`exchange_sizes` of this collection; ``ahead`` in its thread, else in forward."""
        raise NotImplementedError

    def _needed_capacity(self, ids: B) -> Tensor | None:
        """:meth:`needed_capacity` of this collection."""
        return None

    def _route(self, ids: B, capacity: Sequence[int] | None) -> R:
        """:meth:`route` of this collection."""
        raise NotImplementedError

    def _admit(self, ids: R, admission: Admission | None, *, finds_runs: bool) -> R:
        """:meth:`admit` of this collection; ``finds_runs`` for a fused optimizer's update."""
        raise NotImplementedError

    def _fetch_refused(self, rows: R) -> None:
        """Bring rows to the device that were refused when they were admitted."""

    def _submit_fetch(self) -> None:
        """Submit a check that passes, where other ranks may have one of rows that they fetched: the
        ranks reduce their checks together."""

    def _look_up(self, rows: R, *, ahead: bool) -> V:
        """The vectors of ``rows``; ``ahead`` of forward, maybe concurrently with it."""
        raise NotImplementedError

    def _result(self, features: Tree, vectors: V) -> Tree:
        """The result of forward for ``features``, from the vectors that were looked up."""
        raise NotImplementedError


def is_same_batch(one: SparseFeatures, other: SparseFeatures) -> bool:
    """True if two batches are made of the same tensors, in the same way."""
    return one is other or (
        one.values is other.values
        and one.offsets is other.offsets
        and one.weights is other.weights
        and (one.keys, one.batch_size, one.hotness) == (other.keys, other.batch_size, other.hotness)
    )
