"""The specification of the operations on columns in eager torch."""

import torch
from torch import Tensor

from torchembed.core.copies.columns import copies_of_parts


def join_columns_reference(
    parts: list[Tensor], targets: list[int], widths: list[int], num_columns: int
) -> Tensor:
    part_columns = tuple(part.shape[1] for part in parts)
    copies = copies_of_parts(tuple(targets), tuple(widths), part_columns, num_columns)
    pieces = [
        (copy.target, part[:, copy.source : copy.source + copy.width])
        for part, of_part in zip(parts, copies, strict=True)
        for copy in of_part
    ]
    pieces.sort(key=lambda piece: piece[0])
    reserved = parts[0].new_empty(parts[0].shape[0], pieces[0][0])
    return torch.cat([reserved, *(columns for _, columns in pieces)], dim=1)


def split_columns_reference(
    joined: Tensor, targets: list[int], widths: list[int], part_columns: list[int]
) -> list[Tensor]:
    copies = copies_of_parts(tuple(targets), tuple(widths), tuple(part_columns), joined.shape[1])
    return [
        torch.cat([joined[:, copy.target : copy.target + copy.width] for copy in of_part], dim=1)
        if of_part
        else joined.new_empty(joined.shape[0], 0)
        for of_part in copies
    ]
