"""Memory that versions need, known from their folders before anything is loaded."""

from collections.abc import Sequence
from typing import NamedTuple

from torchembed.serving.levels import ServedTable
from torchembed.serving.models.captured_forward import captured_bytes
from torchembed.serving.models.dense_program import PROGRAM_FILE, WEIGHTS_FILE
from torchembed.serving.models.description import ModelDescription
from torchembed.serving.models.errors import OutOfMemoryBudgetError
from torchembed.serving.models.model_options import RowBytes


class MemoryNeeds(NamedTuple):
    """The bytes that a version takes once it is loaded.

    Attributes:
        tables: rows and their keys by the name of the table in its stores.
        dense: the weights and the program of the dense part.
        captured: what graphs of whole answers take, but for what their layers compute.
    """

    tables: dict[str, int]
    dense: int
    captured: int = 0

    @property
    def num_bytes(self) -> int:
        """The sum."""
        return sum(self.tables.values()) + self.dense + self.captured


def memory_needs(
    description: ModelDescription,
    tables: dict[ServedTable, int],
    row_bytes: RowBytes,
    captured_sizes: Sequence[int] = (),
) -> MemoryNeeds:
    """The needs of a version.

    Args:
        tables: with their numbers of rows, as they are served.
        row_bytes: what rows take in the stores.
        captured_sizes: numbers of samples for which answers are captured.
    """
    rows = {t.name: row_bytes(num_rows, t.line_bytes) for t, num_rows in tables.items()}
    files = (description.files[name].num_bytes for name in (PROGRAM_FILE, WEIGHTS_FILE))
    return MemoryNeeds(rows, sum(files), captured_bytes(description, captured_sizes))


def check_needs(what: str, needs: MemoryNeeds, held: dict[str, int], max_bytes: int | None) -> None:
    """Raise ``OutOfMemoryBudgetError`` where a version does not fit beside what is held.

    Args:
        what: the version, for the error.
        held: bytes by the names of tables in stores, and of dense parts.
        max_bytes: None for no limit.
    """
    new = {name: n for name, n in needs.tables.items() if name not in held}
    wanted = sum(new.values()) + needs.dense + needs.captured
    left = None if max_bytes is None else max(0, max_bytes - sum(held.values()))
    if left is not None and wanted > left:
        largest = sorted(new, key=lambda name: -new[name])[:3]
        tables = ", ".join(f"{name} {new[name]:,}" for name in largest)
        captured = f"captured answers {needs.captured:,}; " if needs.captured else ""
        fewer = ", fewer or smaller captured_sizes" if needs.captured else ""
        raise OutOfMemoryBudgetError(
            f"{what} needs {wanted:,} bytes of memory (dense part {needs.dense:,}; {captured}its "
            f"largest tables: {tables or 'none'}), and {left:,} of {max_bytes:,} are left; give "
            f"the server more memory, a narrower row format{fewer}, or a persistent level"
        )
