"""What several rooms speak of: closed sets, and how many are summed at a time."""

import enum

RUN_CHUNK = 32
"""Occurrences of a row whose gradients are summed together, as a chunk of its run; ``kRunChunk`` of
csrc/run_chunks.h is equal."""
ROWS_OF_PARTIAL = 128
"""Samples whose gradients of a bias are summed together, where partial sums are added later;
``kSummedRows`` of csrc/cuda/shallow_product.h is equal."""
COPY_FIELDS = 7
"""Numbers of a copy of a rectangle, see :class:`torchembed.ops.push.RectangleCopy`."""


class Pooling(enum.Enum):
    """How the vectors of a bag become one vector. An empty bag gives zeros under both."""

    SUM = "sum"
    MEAN = "mean"


class OnBadId(enum.IntEnum):
    """What happens to an id outside ``[0, num_rows)``; the values cross into kernels."""

    RAISE = 0
    """The id is looked up as zeros and an ``IndexError`` names it: on the CPU at once, on a GPU
    at the next call, since finding out sooner would make the host wait."""
    CLAMP = 1
    """The id becomes the nearest valid one."""
    ZERO = 2
    """The id is looked up as zeros and gets no gradient."""


class OptimizerKind(enum.IntEnum):
    """The rule of a row update; the values cross into kernels."""

    SGD = 0
    ADAGRAD = 1
    ROWWISE_ADAGRAD = 2
    ADAM = 3
