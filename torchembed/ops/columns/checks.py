"""Requirements of the operations on columns on their arguments."""

from torch import Tensor

from torchembed.core import checks
from torchembed.core.copies.columns import copies_of_parts


def check_join_columns(
    parts: list[Tensor], targets: list[int], widths: list[int], num_columns: int
) -> None:
    if not parts:
        raise ValueError("parts must hold at least one matrix, got none")
    first = parts[0]
    checks.check_float("parts[0]", first)
    for number, part in enumerate(parts):
        name = f"parts[{number}]"
        checks.check_whole_rows(name, part)
        checks.check_dtype(name, part, (first.dtype,), "convert it to the dtype of the first")
        checks.check_same_device("parts[0]", first, **{name: part})
        checks.check_shape(
            name, part, (first.shape[0], part.shape[1]), "(B, columns), of one B for all"
        )
    part_columns = tuple(part.shape[1] for part in parts)
    copies_of_parts(tuple(targets), tuple(widths), part_columns, num_columns)


def check_split_columns(
    joined: Tensor, targets: list[int], widths: list[int], part_columns: list[int]
) -> None:
    checks.check_float("joined", joined)
    checks.check_whole_rows("joined", joined)
    copies_of_parts(tuple(targets), tuple(widths), tuple(part_columns), joined.shape[1])
