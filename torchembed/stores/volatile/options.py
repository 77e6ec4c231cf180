"""Options of stores that hold a bounded number of rows."""

import dataclasses
import enum
import math
from fractions import Fraction

from torchembed.stores.arguments import check_positive

MAX_BATCH_ROWS = 262_143
"""Most rows of a command, which is what Redis takes of a key, its field and its value each."""


class OverflowPolicy(enum.Enum):
    """Choices of the rows that go where a partition holds too many."""

    EVICT_OLDEST = "evict_oldest"
    """Those that were read or written the longest time ago."""
    EVICT_LEAST_USED = "evict_least_used"
    """Those that were read the fewest times since they came. Counts of the others stay."""
    EVICT_RANDOM = "evict_random"
    """Any."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VolatileOptions:
    """Settings of :class:`~torchembed.stores.VolatileMemoryStore` and
    :class:`~torchembed.stores.RedisStore`.

    Args:
        num_partitions: parts of each table, by :func:`~torchembed.core.key_partitions.
            partition_of` its keys. It stays the same while a table holds rows.
        overflow_margin_rows: most rows of a partition of a table; None: as many as come. It is
            compared after each batch.
        overflow_policy: which rows go from a partition with more.
        overflow_resolution_target: share of ``overflow_margin_rows`` that is left then, greater
            than 0 and less than 1.
        max_batch_rows: most rows that are read, written or evicted at once.
    """

    num_partitions: int = 8
    overflow_margin_rows: int | None = None
    overflow_policy: OverflowPolicy = OverflowPolicy.EVICT_RANDOM
    overflow_resolution_target: float = 0.8
    max_batch_rows: int = 65_536

    def __post_init__(self) -> None:
        check_positive("num_partitions", self.num_partitions)
        if self.overflow_margin_rows is not None:
            check_positive("overflow_margin_rows", self.overflow_margin_rows)
        if not isinstance(self.overflow_policy, OverflowPolicy):
            raise TypeError(
                f"overflow_policy must be an OverflowPolicy, got {self.overflow_policy!r}"
            )
        target = self.overflow_resolution_target
        if isinstance(target, bool) or not isinstance(target, float):
            raise TypeError(f"overflow_resolution_target must be a float, got {target!r}")
        if not 0 < target < 1:
            raise ValueError(
                f"overflow_resolution_target must be greater than 0 and less than 1, got {target}"
            )
        check_positive("max_batch_rows", self.max_batch_rows)
        if self.max_batch_rows > MAX_BATCH_ROWS:
            raise ValueError(
                f"max_batch_rows must be at most {MAX_BATCH_ROWS}, got {self.max_batch_rows}"
            )

    @property
    def num_rows_left(self) -> int | None:
        """Rows that an overflow leaves in a partition: ``overflow_margin_rows`` times
        ``overflow_resolution_target`` as it is printed, rounded down; None without a margin."""
        if self.overflow_margin_rows is None:
            return None
        # 100 * 0.29 is less than 29 in floating point.
        return math.floor(
            self.overflow_margin_rows * Fraction(repr(self.overflow_resolution_target))
        )

    @property
    def notes_accesses(self) -> bool:
        """True where times or numbers of reads decide which rows go."""
        return (
            self.overflow_margin_rows is not None
            and self.overflow_policy is not OverflowPolicy.EVICT_RANDOM
        )
