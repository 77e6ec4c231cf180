"""Closed sets of choices, and constants of the order of sums, for all rooms and kernels."""

import enum

RUN_CHUNK = 32
"""Occurrences of a row whose gradients are summed first, as a chunk of its run; equal to
``kRunChunk`` in csrc/run_chunks.h."""
ROWS_OF_PARTIAL = 128
"""Samples of a partial sum of a bias's gradients, where partial sums are added up later;
equal to ``kSummedRows`` in csrc/cuda/shallow_product.h."""
LOG_SECONDS_OF_A_BUCKET = 0.301
"""Width of a bucket of times, in the natural logarithm of seconds: each is of times 1.35 times as
long as those of the bucket before."""
COPY_FIELDS = 7
"""Numbers of a :class:`~torchembed.core.copies.rectangles.RectangleCopy`."""


class Pooling(enum.Enum):
    """Pooling of a bag's vectors ``[N, D]`` into one ``[D]``. An empty bag gives zeros."""

    SUM = "sum"
    MEAN = "mean"


class OnBadId(enum.IntEnum):
    """Treatment of an id outside ``[0, num_rows)``. Kernels receive the numbers."""

    RAISE = 0
    """The id is looked up as zeros and an ``IndexError`` names it: on the CPU at once, on a GPU
    at the next call, since finding out sooner would make the host wait."""
    CLAMP = 1
    """The id becomes the nearest valid one."""
    ZERO = 2
    """The id is looked up as zeros and gets no gradient."""


class OptimizerKind(enum.IntEnum):
    """Rule of an update; kernels get the values."""

    SGD = 0
    ADAGRAD = 1
    ROWWISE_ADAGRAD = 2
    ADAM = 3


class InitializerKind(enum.IntEnum):
    """Distribution of a table's initial values; kernels get the values."""

    UNIFORM = 0
    NORMAL = 1
    CONSTANT = 2
