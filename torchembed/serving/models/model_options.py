"""How a model is served."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from torchembed.serving.levels import RowFormat
from torchembed.serving.models.dynamic_batcher import BatchOptions
from torchembed.serving.models.shared_lookups import LookupFactory
from torchembed.stores import volatile_memory_bytes

RowBytes: TypeAlias = Callable[[int, int], int]
"""The bytes of this process's memory that a table takes in its stores, by its number of rows and
the bytes of a line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options of a served model.

    Raises:
        ValueError: for values that cannot be.
    """

    make_lookup: LookupFactory
    row_bytes: RowBytes = volatile_memory_bytes
    """Memory that rows take in the stores of ``make_lookup``; by default one
    ``VolatileMemoryStore``'s."""
    device: torch.device = torch.device("cpu")
    """Device of the dense part."""
    captured_sizes: tuple[int, ...] = ()
    """Numbers of samples for which whole answers are captured in CUDA graphs, which answer requests
    whose rows are all cached, larger ones in parts; none for no graphs. Models of jagged features
    or weights of ids are computed without."""
    row_format: RowFormat = RowFormat.FP32
    defaults: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By table: each element of the row that ids without one are answered by, in place of what the
    folder says."""
    hugectr_folders: Mapping[str, Sequence[Path]] = dataclasses.field(default_factory=dict)
    """Folders of HugeCTR, by table, that have its rows in place of the model folder."""
    num_latest_versions: int = 1
    """So many of the newest versions answer."""
    versions: tuple[int, ...] = ()
    """The versions that answer, in place of the newest."""
    batching: BatchOptions | None = None
    """None for an answer to each request on its own, in its own thread."""
    rows_by_version: bool = False
    """Whether each version has rows of its own, which updates of that version alone change. Else
    all versions of the model answer by the rows of the moment."""

    def __post_init__(self) -> None:
        if self.num_latest_versions < 1:
            raise ValueError(
                f"num_latest_versions must be at least 1, got {self.num_latest_versions}"
            )
        if min(self.captured_sizes, default=1) < 1:
            raise ValueError(
                f"captured_sizes must be at least 1 sample each, got {self.captured_sizes}"
            )
