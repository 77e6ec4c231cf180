"""The launches of ``join_columns`` and ``split_columns``: copies of rectangles, one launch for each
part.

Byte floor: each column read once and written once.
"""

from collections.abc import Sequence

from torch import Tensor

from torchembed.core.copies.columns import ColumnCopy, copies_of_parts, copies_on_device
from torchembed.triton_kernels.push import launch_copy_rectangles


def launch_join_columns(
    parts: list[Tensor], targets: list[int], widths: list[int], num_columns: int
) -> Tensor:
    """``torchembed::join_columns``; see :func:`torchembed.ops.columns.join_columns`."""
    joined = parts[0].new_empty(parts[0].shape[0], num_columns)
    part_columns = tuple(part.shape[1] for part in parts)
    all_copies = copies_of_parts(tuple(targets), tuple(widths), part_columns, num_columns)
    for part, copies in zip(parts, all_copies, strict=True):
        _copy_columns(part, copies, joined)
    return joined


def launch_split_columns(
    joined: Tensor, targets: list[int], widths: list[int], part_columns: list[int]
) -> list[Tensor]:
    """``torchembed::split_columns``, the inverse of ``join_columns``."""
    all_copies = copies_of_parts(
        tuple(targets), tuple(widths), tuple(part_columns), joined.shape[1]
    )
    parts = [joined.new_empty(joined.shape[0], columns) for columns in part_columns]
    for part, copies in zip(parts, all_copies, strict=True):
        _copy_columns(joined, [copy.back for copy in copies], part)
    return parts


def _copy_columns(source: Tensor, copies: Sequence[ColumnCopy], out: Tensor) -> None:
    on_device = copies_on_device(copies, out)
    bounds = on_device.max_rows, on_device.max_columns, on_device.vector
    launch_copy_rectangles(source, on_device.on_device(), *bounds, out)
