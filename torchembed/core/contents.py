"""Checks of what tensors hold, for ``TORCHEMBED_CHECK_OPERATIONS``.

Each check passes over its tensor and makes the host wait for a GPU, so operations run them only
where that variable is set. csrc/contents.h has the same checks for the C++ library's operations.
"""

from torch import Tensor


def check_in_range(name: str, numbers: Tensor, first: int, end: int, advice: str) -> None:
    """Raise ``IndexError`` unless every one of ``numbers`` is in ``[first, end)``."""
    outside = (numbers < first) | (numbers >= end)
    if outside.any():
        position = int(outside.int().argmax())
        raise IndexError(
            f"{name} must lie in [{first}, {end}), got {int(numbers[position])} at position "
            f"{position}; {advice}"
        )


def check_ascending(name: str, numbers: Tensor, advice: str, *, distinct: bool = False) -> None:
    """Raise ``ValueError`` where one of ``numbers [N]`` is less than the one before it, or, where
    they must be ``distinct``, not greater."""
    before, after = numbers[:-1], numbers[1:]
    wrong = before >= after if distinct else before > after
    if wrong.any():
        position = int(wrong.int().argmax()) + 1
        requirement = "increase" if distinct else "not decrease"
        raise ValueError(
            f"{name} must {requirement}, got {int(numbers[position])} after "
            f"{int(numbers[position - 1])} at position {position}; {advice}"
        )


def check_rows(rows: Tensor, num_rows: int) -> None:
    """Raise ``IndexError`` unless every one of ``rows`` is -1 or a row of ``num_rows``."""
    check_in_range("rows", rows, -1, num_rows, "take them from linearize_ids")


def check_offsets(name: str, offsets: Tensor, num_ids: int) -> None:
    """Raise unless ``offsets`` start at 0, do not decrease and end at ``num_ids`` or before."""
    advice = "offsets are the running sum of the bags' lengths"
    if int(offsets[0]) != 0:
        raise ValueError(f"{name} must start at 0, got {int(offsets[0])}; {advice}")
    check_in_range(name, offsets, 0, num_ids + 1, advice)
    check_ascending(name, offsets, advice)
