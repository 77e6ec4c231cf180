"""A batch after each of the stages of a lookup: bucketized, routed, admitted, looked up.

:mod:`torchembed.modules.staged_collection` says what these do.
"""

import dataclasses
from typing import Generic, TypeVar

import torch

from torchembed.core.features import SparseFeatures

B = TypeVar("B")
"""A collection's own record of a batch's bucketized ids."""
R = TypeVar("R")
"""A collection's own record of a batch's routed ids, and of their rows."""
V = TypeVar("V")
"""The vectors that a collection looks up, a tree of tensors."""


@dataclasses.dataclass(frozen=True, eq=False)
class Bucketized(Generic[B]):
    """A batch whose ids are checked and sorted by the rank that holds their rows."""

    features: SparseFeatures
    """The batch that the collection is going to be called with."""
    ids: B


@dataclasses.dataclass(frozen=True, eq=False)
class Routed(Generic[R]):
    """A batch whose ids have been exchanged: each is on the rank that holds its row.

    Routing changes no table, so it may be repeated, also on ids that nobody trains. Its tensors, as
    :func:`~torchembed.core.trees.tensors_in` gives them, are all that depends on the batch's
    contents where hotness is fixed; the rest follows from the batch's shape.
    """

    features: SparseFeatures
    ids: R


@dataclasses.dataclass(frozen=True, eq=False)
class Admitted(Generic[R]):
    """A batch whose rows are in the tables, and with the runs of equal rows that a fused
    optimizer's update needs."""

    features: SparseFeatures
    rows: R


@dataclasses.dataclass(frozen=True, eq=False)
class LookedUp(Generic[R, V]):
    """A batch whose vectors were looked up, or will be when forward asks for them."""

    features: SparseFeatures
    rows: R
    vectors: V | None = None
    """None where forward is to look them up."""
    ready: torch.cuda.Event | None = None
    """Recorded once the vectors may be read."""
