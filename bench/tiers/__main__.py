"""Steps of DLRM-DCNv2 whose tables are in host memory, behind a cache on the device, or on disk,
behind both, against the same tables on the device and FBGEMM's in managed memory, on the same ids.

``python -m bench.tiers`` prints milliseconds a step through ``TrainPipeline``: of the whole model,
in bfloat16, or with ``--model tables`` of lookup, a loss of the pooled vectors, backward and update
alone. ``link`` is the part of a step that a plain copy would take for the bytes that crossed the
link, the larger of both directions; ``disk`` that which plain reads and writes of one large file
would take for the bytes that came from the disk and went there. Below a cache for all rows the
``rows`` of batches are ``new`` first, so that each batch brings some that the cache never held, and
then, once it has held all of them, ``known``. On a CPU host and device are one memory, and only
ratios say anything.

FBGEMM's tables have torch's dense part above them: run eagerly, as TorchRec's models are, with the
rows of the next batch fetched on a stream of its own meanwhile.

A figure is printed only where the losses of the first steps are right: those of torchembed's tables
elsewhere are those of its tables on the device, bit for bit; these, and FBGEMM's, those of plain
PyTorch with a dense part in float64, as far as rounding goes.

The system keeps files in memory: reads of rows reach the disk only where they are more than it has
room for, but the plain ones always do.
"""

import concurrent.futures
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
from typing import Any, Literal, NamedTuple

import torch
import tyro

from bench.data import dlrm_dcnv2 as workload
from bench.data.workload import EXPONENTS
from bench.report.result_file import Row, write_results
from bench.step.profile import profile_steps
from bench.tiers.disk import measured_disk_rates
from bench.tiers.disk_room import check_caches, check_disk
from bench.tiers.fbgemm import FbgemmTraining
from bench.tiers.link import measured_rates
from bench.tiers.losses import ExpectedLosses
from bench.tiers.movement import Rates, movement
from bench.tiers.row_text import HEADER, row_text, set_up_text
from bench.tiers.setting import TierSetting, make_setting
from bench.tiers.storages import cached_part, on_device, plan_of, planned
from bench.tiers.training import TorchembedTraining
from torchembed import Disk
from torchembed.data import Batch
from torchembed.sharding.planning.topology import MEMORY_SHARE, available_host_bytes

SYSTEMS = (
    *("device", "host", "disk", "planned"),
    *("fbgemm_caching", "fbgemm_managed", "fbgemm_host"),
)
"""``device``: torchembed's tables on the device, with which the others are compared; ``host``: all
of them behind a cache; ``disk``: behind host memory and a cache; ``planned``: where the planner
puts each. FBGEMM's in ``MANAGED_CACHING`` and ``MANAGED`` memory on a GPU, in ``HOST`` memory on a
CPU."""
LOCATIONS = {
    "fbgemm_caching": "MANAGED_CACHING",
    "fbgemm_managed": "MANAGED",
    "fbgemm_host": "HOST",
}
_PROFILED_STEPS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the measurements."""

    model: Literal["dlrm", "tables"] = "dlrm"
    optimizer: Literal["rowwise_adagrad", "adagrad"] = "rowwise_adagrad"
    """The tables' optimizer; the dense part's is Adagrad."""
    batch_sizes: tuple[int, ...] = (2048, 8192)
    ids: tuple[str, ...] = ("zipf", "uniform")
    parts: tuple[float, ...] = (1.0, 0.2, 0.1)
    """Parts of all rows that the cache holds."""
    host_times: float = 2.0
    """Rows in host memory, of tables on disk, for each that the cache holds."""
    disk: Path | None = None
    """Folder for the rows of the system ``disk``; without one it is left out."""
    device_bytes: float | None = None
    """Memory of the device for the system ``planned``; without it it is left out."""
    host_bytes: float | None = None
    """Memory of the host for it; most of what is available where None."""
    systems: tuple[str, ...] = SYSTEMS
    max_rows: int = 4_000_000
    """Tables are cut to this; MLPerf's are of 40 M rows at most."""
    num_checked: int = 4
    """Batches whose losses are checked, each twice: the second time, batches find what the first
    time made of their rows."""
    num_fill: int = 0
    """Batches of uniform ids that then fill the caches, which takes fewer of them. What they leave
    is of no use to skewed ids, so that no more of these hit than after all as many."""
    num_warm_up: int = 24
    """Batches of the measured ids that then warm the caches up."""
    num_repeats: int = 5
    steps: int = 16
    """Steps of each repeat, each with a batch of its own: batches that come again would find their
    rows in the cache."""
    output: Path | None = None
    """JSON to write the rows to."""
    profiles: Path | None = None
    """A folder for a table of kernels and a trace of each line, on a GPU. A process that has used
    the profiler launches more slowly ever after, so that times of further lines are too long."""

    def __post_init__(self) -> None:
        for name, known in (("systems", SYSTEMS), ("ids", tuple(EXPONENTS))):
            unknown = [given for given in getattr(self, name) if given not in known]
            if unknown:
                raise ValueError(f"{name} must be of {', '.join(known)}, got {', '.join(unknown)}")
        if not all(0 < part <= 1 for part in self.parts):
            raise ValueError(f"parts must be above 0 and at most 1, got {self.parts}")
        if not self.host_times >= 1:
            raise ValueError(f"host_times must be at least 1, got {self.host_times}")
        for name in ("max_rows", "num_checked", "num_repeats", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not all(size >= 1 for size in self.batch_sizes):
            raise ValueError(f"batch_sizes must be at least 1, got {self.batch_sizes}")


class _Line(NamedTuple):
    """A system that is measured."""

    system: str
    part: float | None
    """The share of all rows that its cache holds."""


class Bench:
    """Measures the lines of one run."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config, self._device = config, device
        of_disk = None
        if config.disk is not None:
            check_disk(config.disk, config.optimizer, config.max_rows)
            of_disk = measured_disk_rates(config.disk)
        self._rates = Rates(measured_rates(device), of_disk)
        self.rows: list[Row] = []

    def run(self) -> None:
        link, disk = self._rates
        print(f"copies move {link.to_device / 1e9:.1f} GB/s to the device, "
              f"{link.to_host / 1e9:.1f} GB/s to the host")  # fmt: skip
        if disk is not None:
            print(f"the disk reads {disk.read / 1e9:.2f} GB/s of a large file, "
                  f"and writes {disk.written / 1e9:.2f} GB/s")  # fmt: skip
        print(HEADER)
        for batch_size, ids in itertools.product(self._config.batch_sizes, self._config.ids):
            self._compare(
                make_setting(
                    self._config.model,
                    batch_size=batch_size,
                    ids=ids,
                    optimizer=self._config.optimizer,
                    max_rows=self._config.max_rows,
                    device=self._device,
                )
            )

    def _compare(self, setting: TierSetting) -> None:
        batches = self._batches(setting)
        expected = ExpectedLosses(setting, batches[: self._config.num_checked] * 2)
        _free_memory()
        on_device_ms: float | None = None
        for line in self._lines():
            about = self._about(line, setting)
            try:
                rows = self._measured(line, setting, batches, expected, about)
            except Exception as error:  # noqa: BLE001 - said, and the other lines are measured
                traceback.print_exc()
                problem = f"{type(error).__name__}: {error}"
                rows = [{**about, "not_printed_because": problem}]
            _free_memory()
            if line.system == "device":
                expected.on_device = rows[0].get("losses")
                on_device_ms = rows[0].get("ms_median")
            for row in rows:
                if on_device_ms is not None and "ms_median" in row:
                    row["times_device"] = row["ms_median"] / on_device_ms
                print(row_text(row), flush=True)
            self.rows += rows
            if "set_up_seconds" in rows[0]:
                print(set_up_text(rows[0]), flush=True)
            if self._config.output is not None:
                write_results(self._config.output, self.rows)

    def _batches(self, setting: TierSetting) -> list[Batch]:
        """All batches of the setting, in pinned memory for a GPU."""
        config, size = self._config, setting.batch_size
        ids = [setting.ids] * config.num_checked + ["uniform"] * config.num_fill
        ids += [setting.ids] * (config.num_warm_up + config.num_repeats * config.steps)
        if config.profiles is not None:  # those that come again would find their rows cached
            ids += [setting.ids] * (3 * _PROFILED_STEPS)
        with concurrent.futures.ThreadPoolExecutor() as threads:
            sizes, rows = itertools.repeat(size), itertools.repeat(config.max_rows)
            batches = list(threads.map(workload.make_batch, ids, sizes, rows, itertools.count()))
        if self._device.type == "cuda":
            batches = [batch.pin_memory() for batch in batches]
        return batches

    def _lines(self) -> Iterator[_Line]:
        config, on_gpu = self._config, self._device.type == "cuda"
        has_fbgemm = importlib.util.find_spec("fbgemm_gpu") is not None
        for name in config.systems:
            if name in LOCATIONS and (not has_fbgemm or (name == "fbgemm_host") == on_gpu):
                continue
            if name == "disk" and config.disk is None:
                continue
            if name == "planned" and config.device_bytes is None:
                continue
            is_cached = name in ("host", "disk", "fbgemm_caching")
            for part in config.parts if is_cached else (None,):
                yield _Line(name, part)

    def _about(self, line: _Line, setting: TierSetting) -> Row:
        """The part of a row that is known before the system is measured."""
        row: Row = {
            "bench": "tiers",
            "system": line.system,
            "part": line.part,
            "model": setting.model,
            "optimizer": setting.optimizer,
            "batch": setting.batch_size,
            "ids": setting.ids,
            "max_rows": setting.max_rows,
            "link": self._rates.link._asdict(),
            "rows": "new",
        }
        if line.system == "disk" and self._rates.disk is not None:
            row |= {"disk": self._rates.disk._asdict(), "host_times": self._config.host_times}
        if line.system == "planned":
            row |= {"device_bytes": self._config.device_bytes, "host_bytes": self._host_bytes}
        return row

    @property
    def _host_bytes(self) -> float:
        return self._config.host_bytes or MEMORY_SHARE * available_host_bytes()

    def _measured(
        self,
        line: _Line,
        setting: TierSetting,
        batches: Sequence[Batch],
        expected: ExpectedLosses,
        about: Row,
    ) -> list[Row]:
        """The rows of a system: one, or of a cache for all rows two."""
        config, start = self._config, time.perf_counter()
        with contextlib.closing(self._system(line, setting, batches)) as system:
            own = [system.batch(batch) for batch in batches]
            checked = own[: config.num_checked] * 2
            # Around again, since the last steps read ahead.
            stream = itertools.chain(checked, itertools.cycle(own[config.num_checked :]))
            losses = [float(system.step(stream)) for _ in checked]
            error, problem = expected.error(losses, is_fbgemm=line.system in LOCATIONS)
            about |= {
                "set_up_seconds": time.perf_counter() - start,
                "losses": losses,
                "loss_error": error,
            }
            if problem is not None:
                return [{**about, "not_printed_because": problem}]
            if self._device.type == "cuda":
                free, total = torch.cuda.mem_get_info(self._device)
                about["device_gb"] = (total - free) / 1e9
            for _ in range(config.num_fill + config.num_warm_up):
                system.step(stream)
            rows = [about | self._timed(system, stream)]
            if line.part == 1.0:
                for _ in range(config.num_fill + config.num_warm_up):
                    system.step(stream)
                rows.append(about | {"rows": "known"} | self._timed(system, stream))
            if config.profiles is not None and self._device.type == "cuda":
                self._profile(config.profiles, line, setting, lambda: system.step(stream))
        return rows

    def _timed(self, system: Any, stream: Iterator[Any]) -> Row:
        """Times of the next steps, and what they moved."""
        config = self._config
        before, start = system.counts(), time.perf_counter()
        milliseconds = [self._milliseconds(system, stream) for _ in range(config.num_repeats)]
        seconds, after = time.perf_counter() - start, system.counts()
        return {
            "ms_median": statistics.median(milliseconds),
            "ms_min": min(milliseconds),
            "ms_max": max(milliseconds),
            **movement(before, after, config.num_repeats * config.steps, seconds, self._rates),
        }

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

    def _system(self, line: _Line, setting: TierSetting, batches: Sequence[Batch]) -> Any:
        name, part, config = line.system, line.part, self._config
        if name in LOCATIONS:
            return FbgemmTraining(setting, LOCATIONS[name], part or 0.0)
        if name == "planned":
            assert config.device_bytes is not None
            report = plan_of(setting, config.device_bytes, self._host_bytes)
            print(report, flush=True)
            return TorchembedTraining(setting, planned(report))
        if part is None:
            return TorchembedTraining(setting, on_device(setting))
        disk = config.disk if name == "disk" else None
        stored = cached_part(setting, part, disk, config.host_times)
        storage = next(iter(stored.values()))
        if isinstance(storage, Disk):
            check_caches(storage, batches, config.max_rows)
        return TorchembedTraining(setting, stored)

    @staticmethod
    def _profile(folder: Path, line: _Line, setting: TierSetting, step: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profiled = profile_steps(step, _PROFILED_STEPS)
        part = "" if line.part is None else f"-{line.part:.0%}".removesuffix("%")
        file = folder / f"{line.system}{part}-{setting.batch_size}-{setting.ids}"
        Path(f"{file}.txt").write_text(profiled.top_kernels(40))
        profiled.trace.export_chrome_trace(f"{file}.json")


def _free_memory() -> None:
    """Give back what the last system held, so that the next one has room."""
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    on_gpu = torch.cuda.is_available()
    Bench(config, torch.device("cuda" if on_gpu else "cpu")).run()


if __name__ == "__main__":
    main()
