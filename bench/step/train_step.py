"""A training step of DLRM-DCNv2, by torchembed and by TorchRec, on the same ids.

``torchrun --nproc-per-node N -m bench.step.train_step`` prints milliseconds a step and what lies
behind them. All systems begin with the same weights. A figure is printed only where the losses of
the first steps are plain PyTorch's, as far as the precision goes
(:mod:`bench.step.reference_step`). Steps are profiled once all lines are timed, since a process
that has used the profiler launches kernels and graphs more slowly ever after.
"""

import contextlib
import dataclasses
import gc
import itertools
import logging
import os
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

from bench.data import dlrm_dcnv2 as workload
from bench.planning.step_floor import RATES, floor_seconds, num_unique_rows
from bench.report.result_file import TIMED_FIRST, Row, write_results
from bench.step.profile import profile_steps
from bench.step.reference_step import Expected, dense_values, expected_losses
from bench.step.setting import Precisions, StepSetting
from bench.step.table import print_profile, print_row
from bench.step.torchembed_step import TorchembedStep
from torchembed import Dynamic
from torchembed.data import Batch

SYSTEMS = (
    *("torchembed", "torchembed_dynamic", "torchrec", "torchrec_tuned", "torchembed_tf32"),
    *("drop_in", "drop_in_pipeline", "torchrec_bf16", "drop_in_pipeline_bf16"),
    *("torchembed_bf16_rows", "torchembed_fp8_products"),
)
"""``torchembed_dynamic``: every table is dynamic, with room for as many ids as static ones have
rows. ``torchrec_tuned``: fp16 on the wire, and its fused pipeline. ``torchembed_tf32``: in
TorchRec's own precision, with its fp32 wire. ``drop_in``: TorchRec with torchembed's sharder;
``drop_in_pipeline``: and with its pipeline. TorchRec's model computes in tf32, or, where the name
says so, in bf16 under ``torch.autocast``, with bf16 on the wire. ``torchembed_bf16_rows``: rows in
bf16, too, rounded stochastically; ``torchembed_fp8_products``: products of wide linear layers in 8
bits."""
NUM_CHECKED, NUM_PASSES = 2, 3
"""Batches whose losses are checked, and how often they are taken in turn: what the updates of one
pass made of the rows, the next one looks up; from the fourth step on our steps are graphs."""
_WARM_UPS, _PROFILED = 10, 5
"""Steps before those that are profiled, and the number of these."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the measurements; batch sizes, ids and systems in the order of importance."""

    batch_sizes: tuple[int, ...] = (8192, 512, 2048)
    """Samples of each rank."""
    ids: tuple[str, ...] = ("uniform", "zipf")
    optimizer: str = "adagrad"
    precision: str = "bf16"
    wire: str = "bf16"
    transport: str = "collective"
    """Transport of torchembed and its pipelines: ``collective`` or ``push``."""
    systems: tuple[str, ...] = SYSTEMS
    max_rows: int | None = None
    """Tables are cut to this; on one GPU 8 M where None."""
    num_batches: int = 8
    """Batches, taken in turn."""
    num_repeats: int = 10
    seconds: float = 2.0
    """Time to measure each line for, in ``num_repeats`` parts."""
    budget_seconds: float | None = None
    """Leave out what has not begun by then."""
    output: Path | None = None
    """JSON to write the rows to."""
    profiles: Path | None = None
    """A folder for a table of kernels and a trace of each line."""


B = TypeVar("B")


class MeasuredSystem(Protocol[B]):
    """A model, its tables and a pipeline over batches in the system's own form ``B``."""

    @property
    def num_input_stalls(self) -> int:
        """Number of steps that waited for their batch."""
        ...

    def batch(self, batch: Batch, device: torch.device) -> B:
        """The system's form of ``batch``, in pinned memory for a GPU."""
        ...

    def step(self, batches: Iterator[B]) -> Tensor:
        """The loss of one step, on the device."""
        ...

    def close(self) -> None:
        """Destroy its graphs."""
        ...


class Bench:
    """Measures the lines of one run."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config, self._device = config, device
        self._on_gpu = device.type == "cuda"
        self._end = time.perf_counter() + (config.budget_seconds or float("inf"))
        num_ranks = dist.get_world_size()
        self._max_rows = config.max_rows or (8_000_000 if num_ranks == 1 else None)
        self.rows: list[Row] = []

    def run(self) -> None:
        for size, ids in itertools.product(self._config.batch_sizes, self._config.ids):
            if self._is_over():
                say(f"{size:5d} {ids:8} left out, the budget is spent")
                continue
            self._measure_setting(self._setting(size, ids))
        if not self._on_gpu:
            return
        for number, row in enumerate(row for row in self.rows if "ms_median" in row):
            if self._is_over():
                say("further profiles left out, the budget is spent")
                return
            try:
                self._profile_system(row)
            except Exception as error:  # noqa: BLE001 - said, and the other systems are profiled
                traceback.print_exc()
                row["not_profiled_because"] = f"{type(error).__name__}: {error}"
            free_memory()
            if dist.get_rank() == 0:
                print_profile(row, is_first=number == 0)
            self._write()

    def _is_over(self) -> bool:
        """True where the first rank's time is up."""
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
        # TorchRec's fused pipeline knows no CPU.
        names = [s for s in self._config.systems if self._on_gpu or s != "torchrec_tuned"]
        settings = {name: setting_of(name, setting) for name in names}
        batches = self._batches(setting)
        expected = self._expected(setting, [own.precisions for own in settings.values()])
        dense = dense_values(setting)
        free_memory()
        for name, own in settings.items():
            if self._is_over():
                say(
                    f"{setting.batch_size:5d} {setting.ids:8} {name}: left out, the budget is spent"
                )
                continue
            torch.backends.cuda.matmul.allow_tf32 = own.precision != "fp32"
            try:
                row = self._measure_system(name, own, dense, batches, expected)
            except Exception as error:  # noqa: BLE001 - said, and the other systems are measured
                traceback.print_exc()
                problem = f"{type(error).__name__}: {error}"
                row = {**self._about(name, own), "not_printed_because": problem}
            free_memory()
            self.rows.append(row)
            if dist.get_rank() == 0:
                print_row(row, self.rows)
            self._write()

    def _write(self) -> None:
        if dist.get_rank() == 0 and self._config.output is not None:
            write_results(self._config.output, self.rows)

    def _about(self, name: str, setting: StepSetting) -> Row:
        """The part of a row that is known before the system is measured."""
        return {
            "bench": "train_step",
            "system": name,
            "gpu": gpu_name() if self._on_gpu else "none",
            "num_gpus": dist.get_world_size() if self._on_gpu else 0,
            "batch_per_gpu": setting.batch_size,
            "ids": setting.ids,
            "max_rows": setting.max_rows,
            "optimizer": setting.optimizer,
            "precision": setting.precision,
            "rows": setting.rows,
            "wire": setting.wire,
            "transport": setting.transport if _has_transport(name) else None,
            **TIMED_FIRST,
        }

    def _measure_system(
        self,
        name: str,
        setting: StepSetting,
        dense: Sequence[Tensor],
        batches: list[Batch],
        expected: Expected,
    ) -> Row:
        start = time.perf_counter()
        with contextlib.closing(make_system(name, setting, dense)) as system:
            return self._measure(name, system, setting, batches, expected, start)

    def _batches(self, setting: StepSetting) -> list[Batch]:
        """This rank's."""
        count = max(self._config.num_batches, NUM_CHECKED)
        return [self._batch(setting, step, dist.get_rank()) for step in range(count)]

    def _batch(self, setting: StepSetting, step: int, rank: int) -> Batch:
        number = step * dist.get_world_size() + rank
        return workload.make_batch(setting.ids, setting.batch_size, setting.max_rows, number)

    def _expected(self, setting: StepSetting, precisions: Sequence[Precisions]) -> Expected:
        """The right losses, and the rows of a step for its floor, from the first rank."""
        found: list[tuple[Expected, int] | None] = [None]
        if dist.get_rank() == 0:
            ranks = range(dist.get_world_size())
            checked = [
                [self._batch(setting, step, r) for r in ranks] for step in range(NUM_CHECKED)
            ]
            losses = expected_losses(setting, checked * NUM_PASSES, precisions)
            found[0] = losses, num_unique_rows(checked[0], self._device)
        dist.broadcast_object_list(found, 0)
        assert found[0] is not None
        expected, self._num_unique = found[0]
        return expected

    def _measure(
        self,
        name: str,
        system: MeasuredSystem[B],
        setting: StepSetting,
        batches: list[Batch],
        expected: Expected,
        start: float,
    ) -> Row:
        num_ranks = dist.get_world_size()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        own = [system.batch(batch, self._device) for batch in batches]
        checked = own[:NUM_CHECKED] * NUM_PASSES
        stream: Iterator[B] = itertools.chain(checked, itertools.cycle(own))
        losses = [float(system.step(stream)) for _ in checked]
        set_up_seconds = time.perf_counter() - start
        row = {**self._about(name, setting), "set_up_seconds": set_up_seconds}
        limit = expected.tolerance[setting.precisions]
        error, problem = self._error(losses, expected, limit)
        row |= {"loss_error": error, "loss_tolerance": limit}
        if problem is not None:
            return {**row, "not_printed_because": problem}
        milliseconds = [1e3 * each for each in self._time(system, stream)]
        median = statistics.median(milliseconds)
        row |= {
            "ms_median": median,
            "ms_min": min(milliseconds),
            "ms_max": max(milliseconds),
            "samples_per_second": 1e3 * setting.batch_size * num_ranks / median,
            "input_stalls": system.num_input_stalls,
        }
        if self._on_gpu:
            row["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            if gpu_name() in RATES:
                floor = floor_seconds(
                    RATES[gpu_name()],
                    setting.batch_size,
                    num_ranks,
                    self._num_unique,
                    optimizer=setting.optimizer,
                    precision=setting.precision,
                    wire=setting.wire,
                    rows=setting.rows,
                )
                row |= {"floor_ms": 1e3 * floor, "floor_fraction": 1e3 * floor / median}
        return row

    def _error(
        self, losses: list[float], expected: Expected, limit: float
    ) -> tuple[float, str | None]:
        """The largest error of any rank's first losses, and what is wrong where it is too large."""
        true = [of_ranks[dist.get_rank()] for of_ranks in expected.losses]
        mine = max(abs(a - b) for a, b in zip(losses, true, strict=True))
        problem = None
        if not mine <= limit:
            problem = f"losses {losses} are up to {mine:.2e} > {limit:.2e} from {true}"
        found: list[tuple[float, str | None]] = [(mine, problem)] * dist.get_world_size()
        dist.all_gather_object(found, (mine, problem))
        return max(error for error, _ in found), next(filter(None, (p for _, p in found)), None)

    def _time(self, system: MeasuredSystem[B], stream: Iterator[B]) -> list[float]:
        """Seconds a step, of each repeat; the slowest rank's."""
        one = self._seconds(system, stream, 10)
        count = max(int(self._config.seconds / self._config.num_repeats / one), 3)
        return [self._seconds(system, stream, count) for _ in range(self._config.num_repeats)]

    def _seconds(self, system: MeasuredSystem[B], stream: Iterator[B], num_steps: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(num_steps):
            system.step(stream)
        self._wait()
        seconds = torch.tensor((time.perf_counter() - start) / num_steps)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        dist.barrier()

    def _profile_system(self, row: Row) -> None:
        """Add to ``row`` what a profile of some steps says, and the stages of one."""
        setting = self._setting(row["batch_per_gpu"], row["ids"])
        own = setting_of(row["system"], setting)
        torch.backends.cuda.matmul.allow_tf32 = own.precision != "fp32"
        made = self._batches(setting)
        system = make_system(row["system"], own, dense_values(setting))
        with contextlib.closing(system):
            stream = itertools.cycle([system.batch(batch, self._device) for batch in made])
            for _ in range(_WARM_UPS):
                system.step(stream)
            profiled = profile_steps(lambda: system.step(stream), _PROFILED)
            row |= {
                "kernels": profiled.kernels,
                "launches": profiled.launches,
                "host_waits": profiled.host_waits,
                "gpu_busy_ms": profiled.gpu_busy_ms,
                "stage_ms": profiled.stage_ms,
            }
            folder = self._config.profiles
            if folder is not None and dist.get_rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                file = folder / f"{row['system']}-{row['batch_per_gpu']}-{row['ids']}"
                file.with_suffix(".txt").write_text(profiled.top_kernels(40))
                profiled.trace.export_chrome_trace(str(file.with_suffix(".json")))
            # The cost model knows collectives only.
            if isinstance(system, TorchembedStep) and own.transport == "collective":
                row["alone_ms"] = system.alone_ms(made[-1], self._device)
                row |= system.predicted


def setting_of(name: str, setting: StepSetting) -> StepSetting:
    """``setting`` in the precisions of the system."""
    if name in ("torchembed", "torchembed_dynamic"):
        return setting
    if name == "torchembed_bf16_rows":
        return dataclasses.replace(setting, rows="bf16")
    if name == "torchembed_fp8_products":
        return dataclasses.replace(setting, precision="fp8")
    if name.endswith("_bf16"):
        return dataclasses.replace(setting, precision="bf16", wire="bf16")
    wire = "fp16" if name == "torchrec_tuned" else "fp32"
    return dataclasses.replace(setting, precision="tf32", wire=wire)


def _has_transport(name: str) -> bool:
    is_ours = name.startswith("torchembed") and name != "torchembed_tf32"
    return is_ours or name.startswith("drop_in_pipeline")


def make_system(name: str, setting: StepSetting, dense: Sequence[Tensor]) -> MeasuredSystem[Any]:
    """The system of that name, one of ``SYSTEMS``."""
    if name.startswith("torchembed"):
        return TorchembedStep(setting, Dynamic() if name == "torchembed_dynamic" else None)
    # TorchRec warns of each table whose placement leaves no choice.
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    from bench.step.torchrec_step import TorchrecStep

    return TorchrecStep(
        setting,
        dense,
        is_tuned=name == "torchrec_tuned",
        is_drop_in=name == "drop_in",
        is_our_pipeline=name.startswith("drop_in_pipeline"),
    )


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


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # What sharding takes of the memory.
    logging.basicConfig(format="%(message)s")
    logging.getLogger("torchembed").setLevel(logging.INFO)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    bench = Bench(config, device)
    bench.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
