"""Updates of a served model: rows of one of its tables, and its dense part."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class UpdateOrigin:
    """The sender of an update, and the way that it came: what order is told by."""

    publisher: int = 0
    """A random number of its own for each publisher; 0 where messages do not say it."""
    partition: int = 0
    """The messages of a key are in one partition of its topic, in order."""
    published_at: float = 0.0
    """Seconds since 1970 by the publisher's clock."""


@dataclass(frozen=True, kw_only=True)
class RowUpdate:
    """Rows of some keys of a table, and keys that have left it. No key is in both.

    All tensors are on the CPU, and own their memory.
    """

    model: str
    table: str
    version: int
    """Of the model that the rows belong to."""
    sequence: int
    """Which of its publisher's messages it came by, from 1 on."""
    keys: Tensor
    """int64 ``[n]``."""
    rows: Tensor
    """``[n, D]``, of a dtype in :data:`ROW_DTYPES`."""
    deleted_keys: Tensor
    """int64 ``[m]``."""
    origin: UpdateOrigin = field(default_factory=UpdateOrigin)


@dataclass(frozen=True, kw_only=True)
class DenseUpdate:
    """The dense part of a model, whole."""

    model: str
    version: int
    sequence: int
    """Which of its publisher's messages the last of its parts came by, from 1 on."""
    tensors: Mapping[str, Tensor]
    """By name, on the CPU."""
    origin: UpdateOrigin = field(default_factory=UpdateOrigin)


ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that rows have in messages."""
