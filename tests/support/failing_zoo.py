"""A zoo for the bench on two ranks: entries that fail on one of them, around one that does not."""

import os

from tests.zoo import zoo
from tests.zoo.entries import Case, Family
from tests.zoo.sizes import Sizes
from torchembed.core import ranks

FAILING = Family("failing")
_FINE = zoo.ENTRIES["matrix factorization"]


@FAILING.habit("raises on rank 1", _FINE.batches)
def raises(sizes: Sizes) -> Case:
    if ranks.rank() == 1:
        raise ValueError("no model for rank 1")
    return _FINE.make(sizes)


FAILING.habit("fine", _FINE.batches)(_FINE.make)


@FAILING.habit("ends rank 1", _FINE.batches)
def ends(sizes: Sizes) -> Case:
    if ranks.rank() == 1:
        os._exit(3)
    return _FINE.make(sizes)


ENTRIES = {entry.name: entry for entry in FAILING.entries}
