"""Collections whose forward can be begun ahead: what depends on ids alone, without any vector."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures, as_sparse_features
from torchembed.core.trees import map_tensors, tensors_in
from torchembed.modules.table_module import TableModule


class Announced(NamedTuple):
    """What a collection has found out about a batch before any id travels."""

    features: SparseFeatures
    """The batch that the collection is going to be called with."""
    arrivals: Any
    """The collection's own."""


class Prepared(NamedTuple):
    """What a collection has found out about a batch from its ids. Its tensors, as
    :func:`~torchembed.core.trees.tensors_in` gives them, are all that depends on the batch where
    hotness is fixed; the rest follows from the batch's shape."""

    features: SparseFeatures
    """The batch that the collection is going to be called with."""
    lookups: Any
    """The collection's own."""
    vectors: Any = None
    """What was looked up for the batch already, a tree of tensors."""
    are_there: torch.cuda.Event | None = None
    """From when on the vectors may be used."""


class _Handed:
    """What was prepared of a batch that forward is to be called with."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.is_given = False
        """Whether forward has given the vectors that were looked up before."""


class PreparingModule(TableModule):
    """A collection that can do the part of ``forward`` that depends on ids alone before the rest.

    ``module(features)`` does both. A pipeline calls :meth:`prepare` a step ahead, :meth:`look_up`
    before the model's forward and :meth:`handing_over` around it: the collection then recognizes
    the batch by its tensors, whatever the model did to pass them on. Where lengths vary, it calls
    :meth:`announce` before, on a thread that may wait for sizes, and :meth:`prepare_announced`.
    """

    is_pooled = True
    """Whether what it gives has one shape for all batches of as many samples."""
    always_waits_for_sizes = False
    """Whether :meth:`announce` waits also where hotness is fixed."""

    reserved_columns: int = 0
    """Before pooled vectors in memory; :class:`~torchembed.EmbeddingBagCollection` says more."""

    _output_dtype: torch.dtype
    _casts_vectors = False
    """Whether what casts the module casts the vectors, too."""

    _handed_over: "Sequence[_Handed]" = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PreparingModule":
        super()._apply(fn, recurse)
        if self._casts_vectors:
            like = torch.empty(0, dtype=self._output_dtype, device="cpu")
            self._set_output_dtype(fn(like).dtype)
        return self

    def _set_output_dtype(self, dtype: torch.dtype) -> None:
        self._output_dtype = dtype

    def prepare(self, features: Any) -> Prepared:
        """Check and route the ids of ``features``, find their rows, and the runs of equal rows
        that a fused optimizer's step needs.

        Never waits for a GPU where hotness is fixed. Collective where the tables are sharded:
        every rank prepares its batches in the same order, between the same forwards.

        Raises:
            IndexError, ValueError, TypeError: as ``forward`` would.
        """
        batch = as_sparse_features(features)
        with torch.no_grad():
            return self.prepare_announced(Announced(batch, self._announce(batch, ahead=False)))

    def announce(self, features: Any) -> Announced:
        """The part of :meth:`prepare` that may wait for sizes: for this rank's from its GPU, and
        for those of the others through the CPU. No id travels.

        For a thread of its own, one for each process: every rank announces the same batches in the
        same order.

        Raises:
            IndexError, ValueError, TypeError: as ``forward`` would.
        """
        batch = as_sparse_features(features)
        with torch.no_grad():
            return Announced(batch, self._announce(batch, ahead=True))

    def sort(self, features: Any) -> Announced:
        """The part of :meth:`announce` that waits for nothing, and is of this rank alone. All
        shapes follow from those of ``features``; pooled collections only.

        Raises:
            IndexError, ValueError, TypeError: as ``forward`` would.
        """
        batch = as_sparse_features(features)
        with torch.no_grad():
            return Announced(batch, self._sort(batch))

    def needed_capacity(self, announced: Announced) -> Tensor | None:
        """How many ids this rank sends to one at most, int64 ``[]``; None where none travel."""
        with torch.no_grad():
            return self._needed_capacity(announced.arrivals)

    def agreed_capacity(self, needed: int) -> int:
        """The most that a rank needs; for the thread of :meth:`announce`, in the same way."""
        return needed

    def prepare_announced(self, announced: Announced, capacity: int | None = None) -> Prepared:
        """The rest of :meth:`prepare`. Never waits for a GPU; collective in the same way.

        Args:
            capacity: for what was sorted, and not announced: no fewer ids than any rank needs, the
                same on all ranks.
        """
        with torch.no_grad():
            lookups = self._prepare(announced.arrivals, finds_runs=True, capacity=capacity)
        return Prepared(announced.features, lookups)

    def look_up(self, prepared: Prepared) -> Prepared:
        """``prepared`` with its vectors, that ``forward`` gives without looking up again.

        On another stream than forward's it runs beside what the model does before it needs the
        vectors, and so does its backward.
        """
        vectors = self._look_up(prepared.lookups, ahead=True)
        are_there = None
        if self.device.type == "cuda":
            are_there = torch.cuda.Event()
            are_there.record()
        return prepared._replace(vectors=vectors, are_there=are_there)

    @contextlib.contextmanager
    def handing_over(self, prepared: Sequence[Prepared]) -> Iterator[None]:
        """Meanwhile ``forward`` uses what was ``prepared`` for the batch that it is called with.

        A batch is the one that was prepared where its tensors are the same objects, and keys, batch
        size and hotness are equal. Others are looked up as ever.
        """
        before, self._handed_over = self._handed_over, [_Handed(one) for one in prepared]
        try:
            yield
        finally:
            self._handed_over = before

    def forward(self, features: Any) -> Any:
        batch = as_sparse_features(features)
        for handed in self._handed_over:
            if is_same_batch(handed.prepared.features, batch):
                return self._result(features, self._vectors_of(handed))
        lookups = self._prepare(self._announce(batch, ahead=False), finds_runs=False)
        return self._result(features, self._look_up(lookups, ahead=False))

    def _vectors_of(self, handed: "_Handed") -> Any:
        prepared = handed.prepared
        if prepared.vectors is None:
            return self._look_up(prepared.lookups, ahead=False)
        if prepared.are_there is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(prepared.are_there)
            for tensor in tensors_in(prepared.vectors):
                tensor.record_stream(stream)
        vectors = prepared.vectors
        if handed.is_given and self.reserved_columns:
            # Those before these vectors are another caller's by now.
            vectors = map_tensors(torch.clone, vectors)
        handed.is_given = True
        # They have a gradient, also for what comes after ``no_grad``.
        return vectors if torch.is_grad_enabled() else map_tensors(Tensor.detach, vectors)

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        raise NotImplementedError

    def _announce(self, features: SparseFeatures, *, ahead: bool) -> Any:
        """What forward does before ids travel; ``ahead`` on the thread of :meth:`announce`."""
        raise NotImplementedError

    def _sort(self, features: SparseFeatures) -> Any:
        """What :meth:`_announce` gives, before any size is known."""
        return self._announce(features, ahead=True)

    def _needed_capacity(self, arrivals: Any) -> Tensor | None:
        """Of :meth:`needed_capacity`."""
        return None

    def _prepare(self, arrivals: Any, *, finds_runs: bool, capacity: int | None = None) -> Any:
        """What forward then does before vectors are looked up; ``finds_runs`` for fused optimizers'
        steps, ``capacity`` where ids were only sorted."""
        raise NotImplementedError

    def _look_up(self, lookups: Any, *, ahead: bool) -> Any:
        """The vectors of a batch, a tree of tensors; ``ahead`` of forward, beside which it then
        may run."""
        raise NotImplementedError

    def _result(self, features: Any, vectors: Any) -> Any:
        """What forward gives for ``features``, whose vectors were looked up."""
        raise NotImplementedError


def is_same_batch(one: SparseFeatures, other: SparseFeatures) -> bool:
    """Whether two batches are made of the same tensors, in the same way."""
    return one is other or (
        one.values is other.values
        and one.offsets is other.offsets
        and one.weights is other.weights
        and (one.keys, one.batch_size, one.hotness) == (other.keys, other.batch_size, other.hotness)
    )
