"""Collections whose forward can be begun ahead: what depends on ids alone, without any vector."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchembed.core.features import SparseFeatures, as_sparse_features
from torchembed.modules.table_module import TableModule


class Prepared(NamedTuple):
    """What a collection has found out about a batch from its ids. Its tensors, as
    :func:`~torchembed.core.trees.tensors_in` gives them, are all that depends on the batch where
    hotness is fixed; the rest follows from the batch's shape."""

    features: SparseFeatures
    """The batch that the collection is going to be called with."""
    lookups: Any
    """The collection's own."""
    output: Any = None
    """What it gives for the batch, where it was looked up already."""
    is_there: torch.cuda.Event | None = None
    """From when on the output may be used."""


class PreparingModule(TableModule):
    """A collection that can do the part of ``forward`` that depends on ids alone before the rest.

    ``module(features)`` does both. A pipeline calls :meth:`prepare` a step ahead, :meth:`look_up`
    before the model's forward and :meth:`handing_over` around it: the collection then recognizes
    the batch by its tensors, whatever the model did to pass them on.
    """

    _handed_over: Sequence[Prepared] = ()

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
            return Prepared(batch, self._prepare(batch, finds_runs=True))

    def look_up(self, prepared: Prepared) -> Prepared:
        """``prepared`` with its output, that ``forward`` gives without looking up again.

        On another stream than forward's it runs beside what the model does before it needs the
        vectors, and so does its backward.
        """
        output = self._look_up(prepared.features, prepared.lookups)
        is_there = None
        if self.device.type == "cuda":
            is_there = torch.cuda.Event()
            is_there.record()
        return prepared._replace(output=output, is_there=is_there)

    @contextlib.contextmanager
    def handing_over(self, prepared: Sequence[Prepared]) -> Iterator[None]:
        """Meanwhile ``forward`` uses what was ``prepared`` for the batch that it is called with.

        A batch is the one that was prepared where its tensors are the same objects, and keys, batch
        size and hotness are equal. Others are looked up as ever.
        """
        before, self._handed_over = self._handed_over, prepared
        try:
            yield
        finally:
            self._handed_over = before

    def forward(self, features: Any) -> Any:
        batch = as_sparse_features(features)
        for prepared in self._handed_over:
            if not is_same_batch(prepared.features, batch):
                continue
            # What was looked up ahead has a gradient, also for what comes after ``no_grad``.
            if prepared.output is None or not torch.is_grad_enabled():
                return self._look_up(features, prepared.lookups)
            if prepared.is_there is not None:
                stream = torch.cuda.current_stream()
                stream.wait_event(prepared.is_there)
                for tensor in _tensors_of(prepared.output):
                    tensor.record_stream(stream)
            return prepared.output
        return self._look_up(features, self._prepare(batch, finds_runs=False))

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        raise NotImplementedError

    def _look_up(self, features: Any, lookups: Any) -> Any:
        """What forward gives for ``features``, of which ``lookups`` are known."""
        raise NotImplementedError

    def _prepare(self, features: SparseFeatures, *, finds_runs: bool) -> Any:
        """All of forward that depends on ids alone; ``finds_runs`` for fused optimizers' steps."""
        raise NotImplementedError


def is_same_batch(one: SparseFeatures, other: SparseFeatures) -> bool:
    """Whether two batches are made of the same tensors, in the same way."""
    return one is other or (
        one.values is other.values
        and one.offsets is other.offsets
        and one.weights is other.weights
        and (one.keys, one.batch_size, one.hotness) == (other.keys, other.batch_size, other.hotness)
    )


def _tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of what a collection gives."""
    if isinstance(output, dict):
        return [tensor for part in output.values() for tensor in (part.values(), part.offsets())]
    return [output.values()]
