"""Where a table's rows live, as entries of a plan's JSON and as words."""

import dataclasses
from collections.abc import Mapping

from torchembed.tables import HostMemory


def storage_entries(storage: HostMemory | None) -> dict[str, object] | None:
    """``storage`` as a JSON object; None for the device."""
    if storage is None:
        return None
    entries = {name: size for name, size in dataclasses.asdict(storage).items() if size is not None}
    return {"tier": _HOST, **entries}


def storage_from(entries: object) -> HostMemory | None:
    """The storage that :func:`storage_entries` wrote.

    Raises:
        TypeError, ValueError: where ``entries`` are none.
    """
    if entries is None:
        return None
    if not isinstance(entries, Mapping):
        raise TypeError(f"storage must be an object or null, got {entries!r}")
    sizes = dict(entries)
    tier = sizes.pop("tier", None)
    if tier != _HOST:
        raise ValueError(f"tier of storage must be {_HOST!r}, got {tier!r}")
    unknown = sorted(set(sizes) - {field.name for field in dataclasses.fields(HostMemory)})
    if unknown:
        raise ValueError(f"storage has no {unknown}")
    return HostMemory(**sizes)


def storage_text(storage: HostMemory | None) -> str:
    """``storage`` in words: the tier that holds all rows, and the cache of each rank."""
    if storage is None:
        return "device"
    if storage.cache_rows is None:
        return f"{_HOST}, {storage.cache_bytes:,} bytes cached"
    return f"{_HOST}, {storage.cache_rows:,} rows cached"


_HOST = "host"
