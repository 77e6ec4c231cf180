"""The public function of lookups in caches."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.ops.cached_lookup.schema import cached_lookup_op
from torchembed.ops.hash_table import HashTables


class LineCopies(NamedTuple):
    """Copies, on the device, of some of the lines that are in memory of the host."""

    copies: Tensor
    """uint8 ``[C, line_bytes]``."""
    copy_of_line: Tensor
    """int32 ``[R]``: the place of each line's copy, -1 for none."""


class LineUse(NamedTuple):
    """Notes that a lookup takes of the rows that it finds."""

    epoch: Tensor | None
    """int64 ``[1]``, which becomes one more, and then the last use of the rows; None where uses are
    not told apart, and hits and misses alone are counted."""


class FoundLines(NamedTuple):
    """Result of :func:`cached_lookup`."""

    rows: Tensor
    """float32 ``[L, dim]``: zeros where there is no id; ``[0, dim]`` where none are read."""
    slots: Tensor
    """int64 ``[L]``: the slot of each id, the place behind its table's slots where it has none, -1
    where there is no id."""
    is_missing: Tensor
    """bool ``[L]``: True for ids that have no slot."""
    num_missing: Tensor
    """int64 ``[1]``: how many these are."""


def cached_lookup(
    hash_tables: HashTables,
    keys: Tensor,
    tables: Tensor,
    lines: Tensor,
    *,
    line_dtype: torch.dtype,
    dim: int,
    progress: Tensor,
    reads: bool = True,
    copies: LineCopies | None = None,
    use: LineUse | None = None,
) -> FoundLines:
    """Find the slot of each key in its table, and read the line that is there, as float32.

    A key without a slot reads the line behind the slots of its table, its default. Where ``use``
    says so, hits and misses are counted, and the last use is noted. On a GPU it is one launch for
    few keys, and several for many, the last of which reads lines of the host region by region,
    beside copies. Deterministic; never synchronizes.

    Worked example: one table of a bucket of two slots, whose slot 1 holds key 7, and ``lines`` of
    the floats ``1``, ``2`` and ``9``: keys ``[7, 8, 7]`` of tables ``[0, 0, -1]`` give rows
    ``[[2], [9], [0]]``, slots ``[1, 2, -1]``, missing False True False, and 1 missing.

    Args:
        hash_tables: of any number of tables, each with a spare place behind its slots; what ``use``
            says is changed.
        keys: int64 ``[L]``; L < 2**31.
        tables: int32 ``[L]``: -1 where there is no id.
        lines: uint8 ``[R, line_bytes]``, R at least the number of slots; on the device, or for a
            GPU in pinned memory of the host. Elements of 8 bits come behind a float32 scale, by
            which each is multiplied, with zeros behind them up to a multiple of four bytes.
        line_dtype: of elements: float32, float16, bfloat16, float8_e4m3fn or int8.
        dim: elements of a line.
        progress: int64 ``[1]``, zero before and after: memory of the call, which no other one that
            may run at the same time may have.
        reads: False where no rows are wanted.
        copies: of ``lines``, which are then read where a line has one.
        use: None where the lookup is not to leave a trace.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    epoch = None if use is None else use.epoch
    results = cached_lookup_op(
        keys.contiguous(),
        tables.contiguous(),
        hash_tables.digests,
        hash_tables.keys,
        hash_tables.geometry,
        lines,
        line_dtype,
        dim,
        reads,
        None if copies is None else copies.copies,
        None if copies is None else copies.copy_of_line,
        None if epoch is None else hash_tables.touched,
        epoch,
        None if use is None else hash_tables.counters,
        progress,
    )
    return FoundLines(*results)
