"""The specification of the operations on columns in eager torch."""

import torch
from torch import Tensor

from torchembed.core.column_copies import copies_of_parts, in_order


def join_columns_reference(
    parts: list[Tensor], targets: list[int], widths: list[int], num_columns: int
) -> Tensor:
    copies = copies_of_parts(tuple(targets), tuple(widths), tuple(part.shape[1] for part in parts))
    ordered = in_order(copies)
    first = ordered[0][1].target
    reserved = parts[0].new_empty(parts[0].shape[0], first)
    pieces = (parts[part][:, copy.source : copy.source + copy.width] for part, copy in ordered)
    return torch.cat([reserved, *pieces], dim=1)


def split_columns_reference(
    joined: Tensor, targets: list[int], widths: list[int], part_columns: list[int]
) -> list[Tensor]:
    copies = copies_of_parts(tuple(targets), tuple(widths), tuple(part_columns))
    return [
        torch.cat([joined[:, copy.target : copy.target + copy.width] for copy in of_part], dim=1)
        if of_part
        else joined.new_empty(joined.shape[0], 0)
        for of_part in copies
    ]
