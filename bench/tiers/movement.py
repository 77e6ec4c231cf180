"""The bytes that caches moved in some steps, beside those that link and disk could."""

from typing import NamedTuple

from bench.report.result_file import Row
from bench.tiers.disk import DiskRates
from bench.tiers.link import LinkRates


class Rates(NamedTuple):
    """Bytes a second of plain copies."""

    link: LinkRates
    disk: DiskRates | None
    """None where nothing is on a disk."""


def movement(
    before: dict[str, int], after: dict[str, int], num_steps: int, seconds: float, rates: Rates
) -> Row:
    """The figures of a row for ``num_steps``, which took ``seconds``, from the counts of all caches
    before and after; none without caches."""
    if not after:
        return {}
    moved = {name: count - before[name] for name, count in after.items()}
    copying = max(
        moved["bytes_read"] / rates.link.to_device, moved["bytes_written"] / rates.link.to_host
    )
    row: Row = {
        "hit_rate": 1 - moved["unique_misses"] / moved["unique"],
        "bytes_read_per_step": moved["bytes_read"] / num_steps,
        "bytes_written_per_step": moved["bytes_written"] / num_steps,
        "link_fraction": copying / seconds,
        "late_batches": moved["batches_fetched_late"],
        "cache_rows": after["capacity"],
        "cached_rows": after["size"],
    }
    if rates.disk is None or not after["host_capacity"]:
        return row
    from_disk, to_disk = moved["disk_bytes_read"], moved["disk_bytes_written"]
    return row | {
        "host_hit_rate": 1 - moved["host_misses"] / moved["unique"],
        "disk_bytes_read_per_step": from_disk / num_steps,
        "disk_bytes_written_per_step": to_disk / num_steps,
        "disk_fraction": (from_disk / rates.disk.read + to_disk / rates.disk.written) / seconds,
    }
