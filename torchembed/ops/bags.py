"""Bags of ids: arguments that describe them, and their checks, for all operations that pool."""

from collections.abc import Sequence

from torch import Tensor

from torchembed.core import checks

_MAX_BAGS = 2**31
"""Limit of bags in a batch: backward numbers them by int32."""


def hotness_of_bags(offsets: Tensor | None, hotness: Sequence[int] | None) -> list[int]:
    """``hotness`` as the operations take it: empty for jagged bags, which ``offsets`` describe.

    Raises:
        ValueError: unless exactly one of the two is given.
    """
    if (offsets is None) == (hotness is None):
        given = "both" if offsets is not None else "neither"
        raise ValueError(f"give exactly one of offsets and hotness, got {given}")
    return [] if hotness is None else list(hotness)


def check_bags(
    ids_name: str,
    ids: Tensor,
    offsets: Tensor | None,
    hotness: Sequence[int],
    num_features: int,
    batch_size: int,
) -> None:
    """Check that ``ids`` falls into ``num_features * batch_size`` feature-major bags.

    Shapes, dtypes and numbers only: the contents of ``offsets`` are not read, since that would make
    the host wait for a GPU.

    Args:
        ids: ``[L]``; called ``ids_name`` in errors.
        offsets: ``[num_features * batch_size + 1]``, int32 or int64, starting at 0, not decreasing,
            ending at L or before: ids from ``offsets[-1]`` on are spare capacity that no bag holds,
            and their rows are -1. None where every bag of a feature has the same number of ids.
        hotness: ids in each bag, by feature, the same for every sample; not read where there are
            ``offsets``.

    Raises:
        TypeError, ValueError: where it does not.
    """
    checks.check_not_negative("num_features", num_features)
    checks.check_not_negative("batch_size", batch_size)
    if checks.reaches(num_features * batch_size, _MAX_BAGS):
        raise ValueError(
            f"num_features * batch_size must be less than 2**31, got {num_features} * {batch_size};"
            " split the batch"
        )
    if offsets is not None:
        checks.check_ids("offsets", offsets)
        checks.check_same_device(ids_name, ids, offsets=offsets)
        checks.check_numel(
            "offsets", offsets, num_features * batch_size + 1, "num_features * batch_size + 1"
        )
        checks.check_contiguous("offsets", offsets)
        return
    if len(hotness) != num_features or any(count < 0 for count in hotness):
        raise ValueError(
            f"hotness must be {num_features} counts >= 0, one for each feature, got {list(hotness)}"
        )
    checks.check_numel(ids_name, ids, sum(hotness) * batch_size, "sum(hotness) * batch_size")
