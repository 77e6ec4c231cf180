"""The configuration of a served model."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from torchembed.serving.configuration.cache_config import CacheConfig
from torchembed.serving.configuration.choices import RowsOf
from torchembed.serving.configuration.fields import AtLeast, check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """How requests that wait are answered together.

    Raises:
        ValueError: for values that cannot be; it begins with the field's name.
    """

    max_samples: Annotated[int, AtLeast(1)] = 1024
    """Of all requests together."""
    max_delay_microseconds: Annotated[int, AtLeast(0)] = 200
    """How long the first request waits for others."""
    max_waiting_requests: Annotated[int, AtLeast(1)] = 1024
    """More are refused."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HugectrRows:
    """Rows of a table that HugeCTR saved.

    Raises:
        ValueError: for values that cannot be; it begins with the field's name.
    """

    folders: tuple[Path, ...]
    """Each with the files ``key`` and ``emb_vector``."""
    dim: Annotated[int, AtLeast(1)] | None = None
    """Columns of a row, which must be those of the model; None where nobody says."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.folders:
            raise ValueError("folders must be at least one, got none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model that is served, by its name in the models folder.

    Raises:
        ValueError: for values that cannot be; it begins with the field's name.
    """

    name: str
    num_latest_versions: Annotated[int, AtLeast(1)] = 1
    """So many of the newest versions answer, unless ``versions`` names them."""
    versions: tuple[Annotated[int, AtLeast(1)], ...] = ()
    """The versions that answer, in place of the newest."""
    num_instances: Annotated[int, AtLeast(1)] = 1
    """Batches of a version that are computed at once."""
    batching: BatchingConfig | None = BatchingConfig()
    """None for an answer to each request on its own."""
    captured_sizes: tuple[Annotated[int, AtLeast(1)], ...] = ()
    """Numbers of samples for which whole answers are captured in CUDA graphs, which answer batches
    whose rows are all cached, larger ones in parts."""
    hit_rate_threshold: Annotated[float, AtLeast(0)] = 1.1
    """From this part of a lookup's rows in the cache on, the others are answered by their defaults
    and read behind it; above 1 lookups wait for all rows."""
    default_values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By table: all elements of the vector of an id that has no row, in place of what the model
    folder says."""
    hugectr_rows: Mapping[str, HugectrRows] = dataclasses.field(default_factory=dict)
    """Rows of tables, by name, that are loaded in place of those in the model folder."""
    rows: RowsOf = RowsOf.SHARED
    cache: CacheConfig = CacheConfig()

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(
                f"name must be the name of a folder among the models, got {self.name!r}"
            )
        if len(set(self.versions)) != len(self.versions):
            raise ValueError(f"versions must name each version once, got {list(self.versions)}")
        if self.versions and self.num_latest_versions != 1:
            raise ValueError("num_latest_versions must be left out where versions names them")
