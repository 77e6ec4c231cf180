"""Storages of tables as entries of a plan's JSON and as words."""

import dataclasses
from collections.abc import Mapping

from torchembed.tables import Disk, HostMemory, Storage

_TIERS: dict[str, type[Storage]] = {"host": HostMemory, "disk": Disk}


def storage_entries(storage: Storage | None) -> dict[str, object] | None:
    """``storage`` as a JSON object; None for the device."""
    if storage is None:
        return None
    (tier,) = (tier for tier, of_tier in _TIERS.items() if type(storage) is of_tier)
    entries = {name: size for name, size in dataclasses.asdict(storage).items() if size is not None}
    return {"tier": tier, **entries}


def storage_from(entries: object) -> Storage | None:
    """The storage that :func:`storage_entries` wrote.

    Raises:
        TypeError, ValueError: if ``entries`` are none.
    """
    if entries is None:
        return None
    if not isinstance(entries, Mapping):
        raise TypeError(f"storage must be an object or null, got {entries!r}")
    sizes = dict(entries)
    tier = sizes.pop("tier", None)
    if not isinstance(tier, str) or tier not in _TIERS:
        known = " or ".join(map(repr, _TIERS))
        raise ValueError(f"tier of storage must be {known}, got {tier!r}")
    fields = [field.name for field in dataclasses.fields(_TIERS[tier])]
    unknown = sorted(set(sizes) - set(fields))
    if unknown:
        raise ValueError(f"storage has no {unknown}")
    if "path" in fields and "path" not in sizes:
        raise ValueError("path of storage is missing")
    return _TIERS[tier](**sizes)


def storage_text(storage: Storage | None) -> str:
    """``storage`` in words: the tier that holds all rows, and what each rank holds above it."""
    if storage is None:
        return "device"
    cached = f"{_size_text(storage.cache_rows, storage.cache_bytes)} cached"
    if not isinstance(storage, Disk):
        return f"host, {cached}"
    in_host = f"{_size_text(storage.host_rows, storage.host_bytes)} in host"
    return f"disk {storage.path}, {in_host}, {cached}"


def _size_text(num_rows: int | None, num_bytes: int | None) -> str:
    return f"{num_bytes:,} bytes" if num_rows is None else f"{num_rows:,} rows"
