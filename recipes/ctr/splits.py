"""The rows of a data set, divided."""

from typing import NamedTuple

from torch import Tensor

from recipes.ctr.rows import Rows


class Splits(NamedTuple):
    """A data set and which of its rows train, validate and test: int64 row numbers."""

    rows: Rows
    train: Tensor
    validation: Tensor
    test: Tensor
