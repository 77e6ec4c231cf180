"""Steps of DLRM-DCNv2's tables in host memory, behind a cache on the device, and on disk, behind
both, against the same tables on the device and FBGEMM's in managed memory, on the same ids.

``python -m bench.tiers`` prints milliseconds a step: lookup, a loss of the pooled vectors, backward
and row-wise Adagrad. ``link`` is the part of a step that a plain copy would take for the bytes that
crossed the link, the larger of both directions; ``disk`` that which plain reads and writes of one
large file would take for the bytes that came from the disk and went there. A figure is printed only
where the losses of the first steps are right: those of tables on the device bit for bit, or for
FBGEMM as far as rounding goes. On a CPU host and device are one memory, and only ratios say
anything.

The system keeps files in memory: reads of rows reach the disk only where they are more than it has
room for, but the plain ones always do.
"""

import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import tyro

from bench.data import dlrm_dcnv2 as workload
from bench.report.result_file import Row, write_results
from bench.tiers.disk import DiskRates, measured_disk_rates
from bench.tiers.fbgemm import FbgemmTables
from bench.tiers.link import LinkRates, measured_rates
from bench.tiers.tables import TierSetting, TorchembedTables, storage_of
from torchembed import CacheStatistics
from torchembed.data import Batch

SYSTEMS = ("device", "host", "disk", "fbgemm_caching", "fbgemm_managed", "fbgemm_host")
"""``device``: torchembed's tables on the device, with which the others are compared; ``host``:
behind a cache; ``disk``: behind host memory and a cache. FBGEMM's in ``MANAGED_CACHING`` and
``MANAGED`` memory on a GPU, in ``HOST`` memory on a CPU."""
LOCATIONS = {
    "fbgemm_caching": "MANAGED_CACHING",
    "fbgemm_managed": "MANAGED",
    "fbgemm_host": "HOST",
}
FBGEMM_TOLERANCE = 1e-4
"""Largest difference of a loss, which is of the order of 1: sums of float32 numbers in another
order, in a few steps of Adagrad."""
HEADER = (
    "batch ids      system           part  ms median (min to max)     times device  hit rate"
    "  MB read  written   link  late  host hits  MB of disk  written   disk"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the measurements."""

    batch_sizes: tuple[int, ...] = (2048, 8192)
    ids: tuple[str, ...] = ("zipf", "uniform")
    parts: tuple[float, ...] = (1.0, 0.2, 0.1)
    """Parts of all rows that the cache holds."""
    host_times: float = 2.0
    """Rows in host memory, of tables on disk, for each that the cache holds."""
    disk: Path | None = None
    """Folder for the rows of the system ``disk``; without one it is left out."""
    systems: tuple[str, ...] = SYSTEMS
    max_rows: int = 4_000_000
    """Tables are cut to this."""
    num_checked: int = 4
    """Batches whose losses are checked, each twice: the second time, batches find what the first
    time made of their rows."""
    num_warm_up: int = 24
    """Batches that then fill the caches; a cache of all rows gets those that are measured, too."""
    num_repeats: int = 5
    steps: int = 16
    """Steps of each repeat, each with a batch of its own: batches that come again would find their
    rows in the cache."""
    output: Path | None = None
    """JSON to write the rows to."""


class Bench:
    """Measures the lines of one run."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config, self._device = config, device
        self._rates: LinkRates = measured_rates(device)
        self._disk_rates: DiskRates | None = None
        if config.disk is not None:
            config.disk.mkdir(exist_ok=True)
            self._disk_rates = measured_disk_rates(config.disk)
        self.rows: list[Row] = []

    def run(self) -> None:
        rates = self._rates
        print(f"copies move {rates.to_device / 1e9:.1f} GB/s to the device, "
              f"{rates.to_host / 1e9:.1f} GB/s to the host")  # fmt: skip
        if self._disk_rates is not None:
            print(f"the disk reads {self._disk_rates.read / 1e9:.2f} GB/s of a large file, "
                  f"and writes {self._disk_rates.written / 1e9:.2f} GB/s")  # fmt: skip
        print(HEADER)
        for batch_size, ids in itertools.product(self._config.batch_sizes, self._config.ids):
            self._compare(
                TierSetting(
                    batch_size=batch_size,
                    ids=ids,
                    max_rows=self._config.max_rows,
                    device=self._device,
                )
            )

    def _compare(self, setting: TierSetting) -> None:
        config = self._config
        num_batches = config.num_checked + config.num_warm_up + config.num_repeats * config.steps
        batches = [
            workload.make_batch(setting.ids, setting.batch_size, setting.max_rows, number)
            for number in range(num_batches)
        ]
        expected: list[float] | None = None
        on_device: Row | None = None
        for name, part in self._lines():
            row: Row = {
                "bench": "tiers",
                "system": name,
                "part": part,
                "batch": setting.batch_size,
                "ids": setting.ids,
                "max_rows": setting.max_rows,
                "link": self._rates._asdict(),
            }
            if name == "disk" and self._disk_rates is not None:
                row |= {"disk": self._disk_rates._asdict(), "host_times": config.host_times}
            try:
                with contextlib.closing(self._system(name, setting, part)) as system:
                    row |= self._measured(system, batches, expected, row)
            except Exception as error:  # noqa: BLE001 - said, and the other lines are measured
                traceback.print_exc()
                row["not_printed_because"] = f"{type(error).__name__}: {error}"
            gc.collect()
            torch.cuda.empty_cache()
            if name == "device":
                expected, on_device = row.get("losses"), row
            if on_device is not None and "ms_median" in row and "ms_median" in on_device:
                row["times_device"] = row["ms_median"] / on_device["ms_median"]
            self.rows.append(row)
            _print_row(row)
            if self._config.output is not None:
                write_results(self._config.output, self.rows)

    def _lines(self) -> Iterator[tuple[str, float | None]]:
        on_gpu = self._device.type == "cuda"
        has_fbgemm = importlib.util.find_spec("fbgemm_gpu") is not None
        for name in self._config.systems:
            if name in LOCATIONS and (not has_fbgemm or (name == "fbgemm_host") == on_gpu):
                continue
            if name == "disk" and self._config.disk is None:
                continue
            is_cached = name in ("host", "disk", "fbgemm_caching")
            for part in self._config.parts if is_cached else (None,):
                yield name, part

    def _measured(
        self, system: Any, batches: Sequence[Batch], expected: list[float] | None, line: Row
    ) -> Row:
        own = [system.batch(batch, self._device) for batch in batches]
        checked = own[: self._config.num_checked] * 2
        # Around again, since the last steps read ahead.
        stream = itertools.chain(checked, itertools.cycle(own[self._config.num_checked :]))
        losses = [float(system.step(stream)) for _ in checked]
        row: Row = {"losses": losses}
        if expected is not None:
            error = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            row["loss_error"] = error
            if not error <= (0.0 if line["system"] in ("host", "disk") else FBGEMM_TOLERANCE):
                return {**row, "not_printed_because": f"losses {losses} are not {expected}"}
        is_whole = line["part"] == 1.0
        for _ in range(len(own) if is_whole else self._config.num_warm_up):
            system.step(stream)
        before, start = system.counts(), time.perf_counter()
        milliseconds = [self._milliseconds(system, stream) for _ in range(self._config.num_repeats)]
        seconds, after = time.perf_counter() - start, system.counts()
        row |= {
            "ms_median": statistics.median(milliseconds),
            "ms_min": min(milliseconds),
            "ms_max": max(milliseconds),
        }
        if before is not None and after is not None:
            row |= self._moved(before, after, seconds)
        return row

    def _milliseconds(self, system: Any, stream: Iterator[Any]) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(self._config.steps):
            system.step(stream)
        self._wait()
        return (time.perf_counter() - start) / self._config.steps * 1e3

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _system(self, name: str, setting: TierSetting, part: float | None) -> Any:
        if name not in LOCATIONS:
            disk = self._config.disk if name == "disk" else None
            times = self._config.host_times
            storage = None if part is None else storage_of(setting, part, disk, times)
            return TorchembedTables(setting, storage)
        like = TorchembedTables(dataclasses.replace(setting, device=torch.device("cpu")), None)
        weights = [parameter.detach() for parameter in like.tables.parameters()]
        return FbgemmTables(setting, LOCATIONS[name], part or 0.0, weights)

    def _moved(self, before: CacheStatistics, after: CacheStatistics, seconds: float) -> Row:
        """What the caches did in the measured steps, which took ``seconds``."""
        num_steps = self._config.num_repeats * self._config.steps
        num_read = after.bytes_read - before.bytes_read
        num_written = after.bytes_written - before.bytes_written
        copying = max(num_read / self._rates.to_device, num_written / self._rates.to_host)
        unique, misses = (
            getattr(after, name) - getattr(before, name) for name in ("unique", "unique_misses")
        )
        of_disk: Row = {}
        if self._disk_rates is not None and after.host_capacity:
            from_disk = after.disk_bytes_read - before.disk_bytes_read
            to_disk = after.disk_bytes_written - before.disk_bytes_written
            rates = self._disk_rates
            of_disk = {
                "host_hit_rate": 1 - (after.host_misses - before.host_misses) / unique,
                "disk_bytes_read_per_step": from_disk / num_steps,
                "disk_bytes_written_per_step": to_disk / num_steps,
                "disk_fraction": (from_disk / rates.read + to_disk / rates.written) / seconds,
            }
        return of_disk | {
            "hit_rate": 1 - misses / unique,
            "bytes_read_per_step": num_read / num_steps,
            "bytes_written_per_step": num_written / num_steps,
            "link_fraction": copying / seconds,
            "late_batches": after.batches_fetched_late - before.batches_fetched_late,
            "cache_rows": after.capacity,
        }


def _print_row(row: Row) -> None:
    part = "" if row["part"] is None else f"{row['part']:.0%}"
    head = f"{row['batch']:5d} {row['ids']:8} {row['system']:15} {part:>5}"
    if "ms_median" not in row:
        print(f"{head}  not printed: {row['not_printed_because']}", flush=True)
        return
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
    print(line, flush=True)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    on_gpu = torch.cuda.is_available()
    Bench(config, torch.device("cuda" if on_gpu else "cpu")).run()


if __name__ == "__main__":
    main()
