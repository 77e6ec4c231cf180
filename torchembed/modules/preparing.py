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


class PreparingModule(TableModule):
    """A collection that can do the part of ``forward`` that depends on ids alone before the rest.

    ``module(features)`` does both. A pipeline calls :meth:`prepare` a step ahead and, around the
    model's forward, :meth:`handing_over`: the collection then recognizes the batch by its tensors,
    whatever the model did to pass them on.
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

    def _prepared(self, features: Any) -> Any:
        """The lookups of ``features``: those handed over, or made now."""
        batch = as_sparse_features(features)
        for prepared in self._handed_over:
            if _is_same(prepared.features, batch):
                return prepared.lookups
        return self._prepare(batch, finds_runs=False)

    def _prepare(self, features: SparseFeatures, *, finds_runs: bool) -> Any:
        """All of forward that depends on ids alone; ``finds_runs`` for fused optimizers' steps."""
        raise NotImplementedError


def _is_same(one: SparseFeatures, other: SparseFeatures) -> bool:
    return one is other or (
        one.values is other.values
        and one.offsets is other.offsets
        and one.weights is other.weights
        and (one.keys, one.batch_size, one.hotness) == (other.keys, other.batch_size, other.hotness)
    )
