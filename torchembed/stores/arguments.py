"""Checks of what stores are given, the same in every store."""

import torch
from torch import Tensor

from torchembed.core.checks import check_contiguous, check_dim, check_dtype, check_shape

MAX_LINE_BYTES = 1 << 24
"""Longest line."""

MAX_WRITE_BYTES = 1 << 30
"""Most bytes of lines that one call writes, which stores may hold several times over meanwhile."""


def check_keys(keys: Tensor) -> None:
    """Raise unless ``keys`` is an int64 tensor ``[n]`` on the CPU."""
    check_dtype("keys", keys, (torch.int64,), "call .long()")
    check_dim("keys", keys, 1)
    _check_on_cpu("keys", keys)


def check_lines(lines: Tensor, keys: Tensor, line_bytes: int) -> None:
    """Raise unless ``lines`` is a contiguous uint8 tensor on the CPU with a line for each key."""
    check_dtype("lines", lines, (torch.uint8,), "call .view(torch.uint8)")
    check_shape("lines", lines, (len(keys), line_bytes), "number of keys, line_bytes")
    check_contiguous("lines", lines)
    _check_on_cpu("lines", lines)


def check_write(keys: Tensor, lines: Tensor, line_bytes: int) -> None:
    """Raise unless ``lines`` may be written under ``keys`` in one call."""
    check_keys(keys)
    check_lines(lines, keys, line_bytes)
    if lines.numel() > MAX_WRITE_BYTES:
        raise ValueError(
            f"lines must hold at most {MAX_WRITE_BYTES} bytes, got {lines.numel()}; write "
            f"{MAX_WRITE_BYTES // line_bytes} rows at a time"
        )


def check_table(name: str, line_bytes: int) -> None:
    """Raise unless a table may have this name and lines of this length."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {name!r}")
    if not name:
        raise ValueError("name must not be empty; give the table a name")
    check_positive("line_bytes", line_bytes)
    if line_bytes > MAX_LINE_BYTES:
        raise ValueError(f"line_bytes must be at most {MAX_LINE_BYTES}, got {line_bytes}")


def check_same_line(store: str, name: str, made_with: int, line_bytes: int) -> None:
    """Raise ``ValueError`` where a table is opened with another length than it was made with."""
    if made_with != line_bytes:
        raise ValueError(
            f"line_bytes of table {name!r} must be {made_with}, with which it was made in {store}, "
            f"got {line_bytes}; give the table another name, or the store another place"
        )


def check_positive(name: str, value: object) -> None:
    """Raise unless ``value`` is a positive int."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be positive, got {value}")


def _check_on_cpu(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, got {tensor.device}; call .cpu()")
