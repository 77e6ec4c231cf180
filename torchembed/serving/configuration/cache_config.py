"""The configuration of a model's cache of rows."""

import dataclasses
from typing import Annotated

import torch

from torchembed.serving.configuration.fields import AboveUpTo, AtLeast, Between, check_fields
from torchembed.serving.levels import CacheKind, RowFormat

DEFAULT_SHARE = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The rows that a model keeps where it computes.

    At most one of ``rows``, ``bytes`` and ``share`` says how large it is; without them it has a
    fifth of the rows. A static cache has all rows.

    Raises:
        ValueError: for values that cannot be; it begins with the field's name.
    """

    kind: CacheKind = CacheKind.DYNAMIC
    rows: Annotated[int, AtLeast(1)] | None = None
    bytes: Annotated[int, AtLeast(1)] | None = None
    """Of all tables together."""
    share: Annotated[float, AboveUpTo(0, 1)] | None = None
    """Of the rows of all tables."""
    row_format: RowFormat = RowFormat.FP32
    devices: tuple[str, ...] = ()
    """Devices by torch's names, over which the rows are divided; without them the first GPU, or the
    CPU where there is none."""
    refresh_share: Annotated[float, Between(0, 1)] = 0.0
    """Part of the cached rows that is read again from the levels below at each refresh."""
    refresh_delay_seconds: Annotated[float, AtLeast(0)] = 0.0
    """From the start to the first refresh."""
    refresh_interval_seconds: Annotated[float, AtLeast(0)] = 0.0
    """Between refreshes; 0 for none."""

    def __post_init__(self) -> None:
        check_fields(self)
        given = [n for n in ("rows", "bytes", "share") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ValueError(
                f"{given[1]} must be left out where {given[0]} says how large the cache is"
            )
        if self.kind is CacheKind.STATIC and given and self.share != 1.0:
            raise ValueError(f"{given[0]} must be left out for a static cache, which has all rows")
        for i, name in enumerate(self.devices):
            if not _is_device(name):
                raise ValueError(f"devices[{i}] must be cpu or cuda:<number>, got {name!r}")
        refreshes = self.refresh_interval_seconds > 0
        if refreshes and self.refresh_share == 0:
            raise ValueError(
                "refresh_share must be above 0 where refresh_interval_seconds asks for refreshes"
            )
        if refreshes and self.kind is not CacheKind.DYNAMIC:
            raise ValueError(
                "refresh_interval_seconds must be 0 for a cache whose kind is not dynamic, got "
                f"{self.refresh_interval_seconds}"
            )

    def num_rows(self, num_rows: int, line_bytes: int) -> int:
        """The rows that it keeps, of tables of ``num_rows`` with lines of ``line_bytes`` on
        average."""
        if self.kind is CacheKind.STATIC:
            return num_rows
        if self.rows is not None:
            return self.rows
        if self.bytes is not None:
            return max(1, self.bytes // max(1, line_bytes))
        share = DEFAULT_SHARE if self.share is None else self.share
        return max(1, round(num_rows * share))


def _is_device(name: str) -> bool:
    try:
        return torch.device(name).type in ("cpu", "cuda")
    except RuntimeError:
        return False
