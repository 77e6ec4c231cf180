"""How ids are grouped into bags: checked arguments shared by the operations that pool."""

from collections.abc import Sequence

from torch import Tensor

from torchembed.core import checks


def check_bags(
    ids_name: str,
    ids: Tensor,
    offsets: Tensor | None,
    hotness: Sequence[int] | None,
    num_features: int,
    batch_size: int,
) -> list[int]:
    """Check that ``ids`` falls into ``num_features * batch_size`` feature-major bags.

    Shapes and dtypes only: the contents of ``offsets`` are not read, since that would make the host
    wait for a GPU.

    Args:
        ids: ``[L]``; called ``ids_name`` in errors.
        offsets: ``[num_features * batch_size + 1]``, int32 or int64, starting at 0, not decreasing,
            ending at L or before: ids from ``offsets[-1]`` on are spare capacity that no bag holds,
            and their rows are -1. None where ``hotness`` is given.
        hotness: ids a bag for each feature, the same for every sample.

    Returns:
        ``hotness`` as a list, empty for jagged bags.
    """
    if batch_size < 0:
        raise ValueError(f"batch_size must not be negative, got {batch_size}")
    if (offsets is None) == (hotness is None):
        given = "both" if offsets is not None else "neither"
        raise ValueError(f"give exactly one of offsets and hotness, got {given}")
    if offsets is not None:
        checks.check_ids("offsets", offsets)
        checks.check_same_device(ids_name, ids, offsets=offsets)
        checks.check_numel(
            "offsets", offsets, num_features * batch_size + 1, "num_features * batch_size + 1"
        )
        return []
    assert hotness is not None
    hotness = list(hotness)
    if len(hotness) != num_features or any(count < 0 for count in hotness):
        raise ValueError(
            f"hotness must be {num_features} counts >= 0, one for each feature, got {hotness}"
        )
    checks.check_numel(ids_name, ids, sum(hotness) * batch_size, "sum(hotness) * batch_size")
    return hotness
