"""Rows of a weight and of its optimizer states side by side in the memory of the host.

A GPU translates an address of the host for each place that it touches, which takes longer than the
bytes of a row: so a row and its state are one line there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.tables.tiers.host_memory import host_tensor

_STATE_BYTES = 4
"""Bytes of an element of a state; states begin at multiples of them."""
_SECTOR_BYTES = 32
"""The fewest bytes that a GPU reads at once."""


def padded_line_bytes(row_bytes: int, state_bytes: int) -> int:
    """Bytes from the beginning of a line to that of the next one.

    Lines that have a state begin at multiples of a power of two: 32 bytes, or less where they are
    short, so that the space between two of them is less than a sixteenth of a line, or less than an
    element. Rows without a state have none between them.

    Worked example: 128 float32 numbers with one for their state are 516 bytes, in lines of 544;
    three 16-bit numbers with one, 2 bytes before it, are a line of 12.

    Args:
        row_bytes: of the weight.
        state_bytes: of all states together.
    """
    if not state_bytes:
        return row_bytes
    line_bytes = _round_up(row_bytes, _STATE_BYTES) + state_bytes
    alignment = _STATE_BYTES
    while alignment < _SECTOR_BYTES and alignment * 32 <= line_bytes:
        alignment *= 2
    return _round_up(line_bytes, alignment)


def row_lines(
    weight: Tensor, state_shapes: Sequence[Sequence[int]], device: torch.device
) -> list[Tensor]:
    """Uninitialized memory of the host, which kernels on ``device`` may access, for the rows of a
    weight and of its states: views of one tensor of lines.

    Args:
        weight: of the shape ``[R, D]`` and the dtype that the first view is to have.
        state_shapes: ``[R, ...]``, of each float32 state.

    Raises:
        RuntimeError: if the memory cannot be locked.
    """
    num_rows, dtype = len(weight), weight.dtype
    row_bytes = weight.shape[1] * dtype.itemsize
    sizes = [torch.Size(shape[1:]).numel() * _STATE_BYTES for shape in state_shapes]
    stride = padded_line_bytes(row_bytes, sum(sizes))
    lines = host_tensor((num_rows, stride), torch.uint8, device)
    found = [lines[:, :row_bytes].view(dtype)]
    first = _round_up(row_bytes, _STATE_BYTES)
    for shape, size in zip(state_shapes, sizes, strict=True):
        part = lines[:, first : first + size].view(torch.float32)
        found.append(part.unflatten(1, shape[1:]) if len(shape) > 1 else part.squeeze(1))
        first += size
    return found


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
