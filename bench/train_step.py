"""A training step of DLRM-DCNv2, by torchembed and by TorchRec, side by side on the same ids.

``torchrun --nproc-per-node N -m bench.train_step`` prints milliseconds a step and what lies behind
them. Both systems begin with the same weights. A figure is printed only where the losses of the
first steps are the same, as far as their precisions go.
"""

import dataclasses
import gc
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro

from bench import dlrm_dcnv2 as workload
from bench.result_file import write_results
from bench.step_floor import RATES, floor_seconds
from bench.step_profile import profile_steps
from bench.step_setting import StepSetting
from bench.torchembed_step import TorchembedStep
from torchembed.data import Batch

SYSTEMS = ("torchembed", "torchrec", "torchrec_tuned")
MAX_LOSS_DIFFERENCE = {"bf16": 5e-2, "tf32": 2e-2, "fp32": 2e-2}
"""Of the losses (about 0.7 at first) of two passes over the batches, between the systems, of which
the peer runs in tf32. In the second pass they are what the updates of the first one made them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What to measure. Rows of the table are in the order of their worth."""

    batch_sizes: tuple[int, ...] = (8192, 512, 2048)
    """Samples of each rank."""
    ids: tuple[str, ...] = ("uniform", "zipf")
    optimizer: str = "adagrad"
    precision: str = "bf16"
    wire: str = "bf16"
    transport: str = "collective"
    """Of torchembed: ``collective`` or ``push``."""
    systems: tuple[str, ...] = SYSTEMS
    max_rows: int | None = None
    """Tables are cut to this; on one GPU 8 M where None."""
    num_batches: int = 8
    """Batches, taken in turn."""
    num_repeats: int = 10
    seconds: float = 2.0
    """How long to measure each line, in ``num_repeats`` parts."""
    budget_seconds: float | None = None
    """Leave out what has not begun by then."""
    output: Path | None = None
    """JSON to write the rows to."""
    profiles: Path | None = None
    """A folder for a table of kernels and a trace of each line."""


class Bench:
    """Measures the lines of one run."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config, self._device = config, device
        self._end = time.perf_counter() + (config.budget_seconds or float("inf"))
        num_ranks = dist.get_world_size()
        self._max_rows = config.max_rows or (8_000_000 if num_ranks == 1 else None)
        self.rows: list[dict[str, Any]] = []

    def run(self) -> None:
        for size, ids in itertools.product(self._config.batch_sizes, self._config.ids):
            if self._is_over():
                say(f"{size} {ids}: left out, the budget is spent")
                continue
            self._measure_setting(self._setting(size, ids))

    def _is_over(self) -> bool:
        """Whether the first rank's time is up."""
        over = torch.tensor(time.perf_counter() > self._end, dtype=torch.int32)
        dist.broadcast(over, 0)
        return bool(over)

    def _setting(self, batch_size: int, ids: str) -> StepSetting:
        config = self._config
        return StepSetting(
            batch_size=batch_size,
            ids=ids,
            optimizer=config.optimizer,
            precision=config.precision,
            wire=config.wire,
            transport=config.transport,
            max_rows=self._max_rows,
            device=self._device,
        )

    def _measure_setting(self, setting: StepSetting) -> None:
        rank, num_ranks, count = dist.get_rank(), dist.get_world_size(), self._config.num_batches
        shape = setting.ids, setting.batch_size, setting.max_rows
        batches = [workload.make_batch(*shape, step * num_ranks + rank) for step in range(count)]
        others = range(num_ranks) if rank == 0 else ()
        of_ranks = [workload.make_batch(*shape, other) for other in others]
        outcomes: dict[str, list[float]] = {}
        # The dense part's initial values are torchembed's, whichever system is measured.
        ours = TorchembedStep(setting)
        dense = ours.initial_dense
        for name in ("torchembed", *(s for s in self._config.systems if s != "torchembed")):
            if name == "torchembed":
                system, ours = ours, None
            else:
                from bench.torchrec_step import TorchrecStep

                system = TorchrecStep(setting, dense, is_tuned=name == "torchrec_tuned")
            row = self._measure(name, system, setting, batches, of_ranks, outcomes)
            system.close()
            del system
            free_memory()
            if rank == 0:
                self.rows.append(row)
                print_row(row, self.rows)

    def _measure(
        self,
        name: str,
        system: Any,
        setting: StepSetting,
        batches: list[Batch],
        of_ranks: list[Batch],
        outcomes: dict[str, list[float]],
    ) -> dict[str, Any]:
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        own = [system.batch(batch, self._device) for batch in batches]
        stream: Iterator[Any] = itertools.cycle(own)
        outcomes[name] = [float(system.step(stream)) for _ in range(2 * len(own))]
        problem = self._difference(name, outcomes, setting)
        seconds = self._time(system, stream)
        row: dict[str, Any] = {
            "bench": "train_step",
            "system": name,
            "gpu": gpu_name() if on_gpu else "none",
            "num_gpus": dist.get_world_size() if on_gpu else 0,
            "batch_per_gpu": setting.batch_size,
            "ids": setting.ids,
            "optimizer": setting.optimizer,
            "precision": setting.precision if name == "torchembed" else "tf32",
            "transport": setting.transport if name == "torchembed" else None,
            "wire": setting.wire if name == "torchembed" else "fp16" if "tuned" in name else "fp32",
        }
        if problem is not None:
            return {**row, "not_printed_because": problem}
        milliseconds = [1e3 * each for each in seconds]
        median = statistics.median(milliseconds)
        row |= {
            "ms_median": median,
            "ms_min": min(milliseconds),
            "ms_max": max(milliseconds),
            "samples_per_second": 1e3 * setting.batch_size * dist.get_world_size() / median,
        }
        if on_gpu:
            row |= self._behind(name, system, stream, setting)
            if of_ranks and gpu_name() in RATES:
                floor = floor_seconds(
                    RATES[gpu_name()], of_ranks, setting.optimizer, row["precision"], row["wire"]
                )
                row |= {"floor_ms": 1e3 * floor, "floor_fraction": 1e3 * floor / median}
        return row

    def _difference(
        self, name: str, outcomes: dict[str, list[float]], setting: StepSetting
    ) -> str | None:
        """What is wrong with ``name``'s outcome beside torchembed's, on any rank."""
        problem = None
        ours, losses = outcomes["torchembed"], outcomes[name]
        apart = max(abs(a - b) for a, b in zip(ours, losses, strict=True))
        if not apart <= MAX_LOSS_DIFFERENCE[setting.precision]:
            problem = f"losses {losses} are {apart:.2e} from torchembed's {ours}"
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        return next(filter(None, problems), None)

    def _time(self, system: Any, stream: Iterator[Any]) -> list[float]:
        """Seconds a step, of each repeat; the slowest rank's."""
        one = self._seconds(system, stream, 10)
        count = max(int(self._config.seconds / self._config.num_repeats / one), 3)
        return [self._seconds(system, stream, count) for _ in range(self._config.num_repeats)]

    def _seconds(self, system: Any, stream: Iterator[Any], num_steps: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(num_steps):
            system.step(stream)
        self._wait()
        seconds = torch.tensor((time.perf_counter() - start) / num_steps)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def _behind(
        self, name: str, system: Any, stream: Iterator[Any], setting: StepSetting
    ) -> dict[str, Any]:
        """Peak memory, and what a profile of some steps says."""
        peak = torch.cuda.max_memory_allocated()
        profiled = profile_steps(lambda: system.step(stream), 5)
        folder = self._config.profiles
        if folder is not None and dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{name}-{setting.batch_size}-{setting.ids}"
            file.with_suffix(".txt").write_text(profiled.top_kernels(40))
            profiled.trace.export_chrome_trace(str(file.with_suffix(".json")))
        return {
            "peak_memory_gb": peak / 1e9,
            "kernels": profiled.kernels,
            "launches": profiled.launches,
            "host_waits": profiled.host_waits,
            "gpu_busy_ms": profiled.gpu_busy_ms,
        }


def free_memory() -> None:
    """Give back what the last system held, so that the next one has room."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def gpu_name() -> str:
    """``H100`` for NVIDIA's."""
    name = torch.cuda.get_device_name()
    return next((known for known in RATES if known in name), name)


def say(line: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def print_row(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """One line of the table, with the ratio to torchembed in the same setting."""
    if len(rows) == 1:
        print(
            "batch ids      system          ms median (min to max)     samples/s   ratio   floor"
            "  busy ms  kernels  launches  waits  peak GB"
        )
    head = f"{row['batch_per_gpu']:5d} {row['ids']:8} {row['system']:15}"
    if "ms_median" not in row:
        print(f"{head} not printed: {row['not_printed_because']}")
        return
    same = ("batch_per_gpu", "ids")
    ours = next(
        r for r in reversed(rows)
        if r["system"] == "torchembed" and all(r[key] == row[key] for key in same)
    )  # fmt: skip
    ratio = row["ms_median"] / ours["ms_median"]
    line = (
        f"{head} {row['ms_median']:8.3f} ({row['ms_min']:.3f} to {row['ms_max']:.3f})"
        f" {row['samples_per_second']:12.0f} {ratio:7.2f}"
    )
    if "kernels" in row:
        floor = f"{row['floor_fraction']:7.2f}" if "floor_fraction" in row else "      -"
        line += (
            f"{floor} {row['gpu_busy_ms']:8.3f} {row['kernels']:8.0f} {row['launches']:9.0f}"
            f" {row['host_waits']:6.1f} {row['peak_memory_gb']:8.1f}"
        )
    print(line, flush=True)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = config.precision != "fp32"
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    bench = Bench(config, device)
    bench.run()
    if dist.get_rank() == 0 and config.output is not None:
        write_results(config.output, bench.rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
