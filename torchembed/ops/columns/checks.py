"""Requirements of the operations on columns on their arguments."""

from torch import Tensor

from torchembed.core import checks
from torchembed.core.column_copies import copies_of_parts, first_column


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
    _check_pieces(targets, widths, [part.shape[1] for part in parts], num_columns)


def check_split_columns(
    joined: Tensor, targets: list[int], widths: list[int], part_columns: list[int]
) -> None:
    checks.check_float("joined", joined)
    checks.check_whole_rows("joined", joined)
    _check_pieces(targets, widths, part_columns, joined.shape[1])


def _check_pieces(
    targets: list[int], widths: list[int], part_columns: list[int], num_columns: int
) -> None:
    if len(targets) != len(widths):
        raise ValueError(
            f"targets must hold {len(widths)} numbers, one for each width, got {len(targets)}"
        )
    copies_of_parts(tuple(targets), tuple(widths), tuple(part_columns))
    first_column(targets, widths, num_columns)
