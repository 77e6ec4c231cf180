"""Records of the arguments of the update operations, as every kernel of them takes them.

A dispatcher's schema has no records, so ``torchembed::rowwise_update`` takes its arguments one by
one; :func:`torchembed.core.dispatch.define_op` makes the record once, before checks and kernels.
Fields are in the order of the schema.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class RowUpdate(NamedTuple):
    """Arguments of ``torchembed::rowwise_update``, for ``L`` ids and a weight ``[R, D]``.

    :func:`torchembed.ops.rowwise_update.rowwise_update` says what they mean.
    """

    weight: Tensor
    """``[R, D]``, float32, float16 or bfloat16; changed."""
    state0: Tensor | None
    """First optimizer state, float32 ``[R, D]`` or ``[R]``; changed."""
    state1: Tensor | None
    """Second optimizer state, float32 ``[R, D]``; changed."""
    unique_rows: Tensor
    starts: Tensor
    order: Tensor
    num_runs: Tensor
    chunk_runs: Tensor
    """These five are the :class:`~torchembed.ops.segments.Runs` of the ids' rows."""
    grad: Tensor
    gradient_rows: Tensor | None
    scales: Tensor | None
    """These three are :class:`~torchembed.ops.rowwise_update.RowGradients`."""
    lr: Tensor
    """Learning rate, float32 ``[1]``."""
    step: Tensor | None
    """Steps counted from 1, float32 ``[1]``."""
    grad_multiplier: Tensor | None
    """Factor of every gradient, float32 ``[1]``."""
    skip: Tensor | None
    """float32 ``[1]``; nothing is changed where it is not zero."""
    row_offsets: Tensor | None
    row_keys: Tensor | None
    first_columns: Tensor | None
    """These three are :class:`~torchembed.ops.rowwise_update.RoundingKeys`."""
    optimizer: int
    """Value of an :class:`~torchembed.core.types.OptimizerKind`."""
    eps: float
    beta1: float
    beta2: float
    weight_decay: float
    max_gradient: float
    """Bound of each element of a summed gradient; none where it is 0."""


class DenseUpdate(NamedTuple):
    """Arguments of ``torchembed::dense_update``, for a flat weight of ``N`` elements.

    :func:`torchembed.ops.dense_update.dense_update` says what they mean.
    """

    weight: Tensor
    """float32 ``[N]``; changed, as the states and ``rounded`` are."""
    state0: Tensor | None
    state1: Tensor | None
    rounded: Tensor | None
    """16-bit copy of ``weight``."""
    grad: Tensor
    lr: Tensor
    step: Tensor | None
    grad_multiplier: Tensor | None
    skip: Tensor | None
    bounds: Sequence[int]
    """Begin and end of each part that is updated, one after the other."""
    optimizer: int
    """Value of an :class:`~torchembed.core.types.OptimizerKind`."""
    eps: float
    beta1: float
    beta2: float
    weight_decay: float

    def parts(self) -> list[tuple[int, int]]:
        """Begin and end of each part that is updated."""
        return list(zip(self.bounds[::2], self.bounds[1::2], strict=True))


class RowInitialization(NamedTuple):
    """Arguments of ``torchembed::initialize_rows``, for ``n`` rows of a weight ``[R, D]``.

    :func:`torchembed.ops.initialize_rows.initialize_rows` says what they mean.
    """

    weight: Tensor
    state0: Tensor | None
    state1: Tensor | None
    """These three are changed."""
    rows: Tensor
    ids: Tensor
    tables: Tensor
    num_new: Tensor | None
    table_keys: Tensor
    kinds: Tensor
    parameters: Tensor
    first_columns: Tensor | None
    initial_state: float
