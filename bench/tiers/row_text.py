"""Rows of results as lines of text."""

from bench.report.result_file import Row

HEADER = (
    "batch ids      system           part rows   ms median (min to max)     times device  hit rate"
    "  MB read  written   link  late  host hits  MB of disk  written   disk"
)


def row_text(row: Row) -> str:
    """One line below ``HEADER``."""
    part = "" if row["part"] is None else f"{row['part']:.0%}"
    head = f"{row['batch']:5d} {row['ids']:8} {row['system']:15} {part:>5} {row['rows']:5}"
    if "ms_median" not in row:
        return f"{head}  not printed: {row['not_printed_because']}"
    line = f"{head} {row['ms_median']:9.3f} ({row['ms_min']:.3f} to {row['ms_max']:.3f})"
    if "times_device" in row:
        line += f" {row['times_device']:12.2f}"
    if "hit_rate" in row:
        line += (
            f"  {row['hit_rate']:8.3f} {row['bytes_read_per_step'] / 1e6:8.1f}"
            f" {row['bytes_written_per_step'] / 1e6:8.1f} {row['link_fraction']:6.2f}"
            f" {row['late_batches']:5d}"
        )
    if "disk_fraction" in row:
        line += (
            f" {row['host_hit_rate']:10.3f} {row['disk_bytes_read_per_step'] / 1e6:11.1f}"
            f" {row['disk_bytes_written_per_step'] / 1e6:8.1f} {row['disk_fraction']:6.2f}"
        )
    return line


def set_up_text(row: Row) -> str:
    """The part of a row that precedes its steps, for a row whose losses are known."""
    line = f"      set up in {row['set_up_seconds']:.1f} s"
    return line + (f", {row['device_gb']:.1f} GB on the device" if "device_gb" in row else "")
