"""The host's microseconds in each captured step, by parts.

``python -m bench.step.host`` trains DLRM-DCNv2 by ``TrainPipeline`` on one GPU, with batches in
pinned memory, and prints the median and the 99th percentile of what the main thread spends in a
step: in the launch of its graph, in copies and checks, and in waits for the GPU. On a CPU, which
has no graphs, the launch is the step itself, and all other parts are the same code.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import tyro

from bench.data import dlrm_dcnv2 as workload
from bench.report.result_file import Row, write_results
from bench.step.model_optimizers import half_precision, make_optimizers
from bench.step.setting import StepSetting
from torchembed.ops.binary_cross_entropy import binary_cross_entropy
from torchembed.step.batch_intake import BatchIntake
from torchembed.step.batches.input_buffers import InputBuffers
from torchembed.step.engines.captured_call import CapturedCall
from torchembed.step.engines.engine_choice import EngineChoice
from torchembed.step.engines.static_step import StaticStep
from torchembed.step.steps_in_flight import StepsInFlight
from torchembed.step.watches.watched_values import WatchedValues
from torchembed.training import TrainPipeline

LAUNCH, WAIT = "launch of the graph", "wait for the GPU"
OTHERS = "all but launch and wait"
_WARM_UPS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Steps to measure."""

    batch_sizes: tuple[int, ...] = (512, 8192)
    max_rows: int = 100_000
    """Rows of each table at most; the host's work does not depend on them."""
    num_steps: int = 1000
    num_batches: int = 8
    precision: str = "bf16"
    output: Path | None = None
    """JSON to write the rows to."""


class HostClock:
    """Nanoseconds that calls of some methods take, each less those of others among them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        """For each step the time of each part."""
        self._inner: list[int] = []
        """For each call under way, the time of measured calls within it."""

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, with its time added to the part ``name`` of the last step."""

        @functools.wraps(call)
        def measured(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0)
            start = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                total = time.perf_counter_ns() - start
                inner = self._inner.pop()
                if self._inner:
                    self._inner[-1] += total
                if self.steps:
                    self.steps[-1][name] += total - inner

        return measured

    @contextlib.contextmanager
    def watching(self, methods: dict[str, tuple[type, str]]) -> Iterator[None]:
        """A context in which the methods, each by its class and name, are measured as parts."""
        before = [(kind, method, getattr(kind, method)) for kind, method in methods.values()]
        for name, (kind, method, call) in zip(methods, before, strict=True):
            setattr(kind, method, self.timed(name, call))
        try:
            yield
        finally:
            for kind, method, call in before:
                setattr(kind, method, call)

    def begin_step(self) -> None:
        self.steps.append(collections.Counter())


def methods_of(device: torch.device) -> dict[str, tuple[type, str]]:
    """The parts of a step, by the methods that do them."""
    is_cuda = device.type == "cuda"
    return {
        LAUNCH: (torch.cuda.CUDAGraph, "replay") if is_cuda else (CapturedCall, "_run"),
        WAIT: (StepsInFlight, "_wait_for"),
        "look for changed values": (WatchedValues, "look"),
        "take a batch in": (BatchIntake, "take_in"),
        "begin its copy": (InputBuffers, "fill"),
        "choice of the engine": (EngineChoice, "run"),
        "get the step ready": (StaticStep, "make_ready"),
        "step around its launch": (StaticStep, "run"),
    }


def measure(
    config: Config,
    batch_size: int,
    device: torch.device,
    sizes: workload.DenseSizes = workload.DENSE_SIZES,
) -> list[dict[str, int]]:
    """Nanoseconds of each part of each step."""
    setting = StepSetting(
        batch_size=batch_size,
        ids="uniform",
        optimizer="adagrad",
        precision=config.precision,
        wire=config.precision,
        max_rows=config.max_rows,
        device=device,
    )
    half = half_precision(setting)
    model = workload.make_model(
        workload.table_configs(config.max_rows),
        sizes,
        table_device=device,
        device=device,
        seed=setting.seed,
        output_dtype=torch.float32 if half is None else half,
    )
    made = [
        workload.make_batch("uniform", batch_size, config.max_rows, number)
        for number in range(config.num_batches)
    ]
    if device.type == "cuda":
        made = [batch.pin_memory() for batch in made]
    batches, clock = itertools.cycle(made), HostClock()
    pipeline = TrainPipeline(
        model,
        binary_cross_entropy,
        list(make_optimizers(model, setting)),
        autocast=half,
        capture=True,
        self_check_every=None,
    )
    progress = clock.timed("all else", pipeline.progress)
    with pipeline, clock.watching(methods_of(device)):
        for step in range(_WARM_UPS + config.num_steps):
            if step >= _WARM_UPS:
                clock.begin_step()
            progress(batches)
        if pipeline.num_captures != 2:
            raise AssertionError(f"steps must be captured twice, got {dict(pipeline.kinds)}")
    return clock.steps


def percentiles(steps: Sequence[dict[str, int]], parts: Sequence[str]) -> dict[str, float]:
    """Median and 99th percentile of the sum of ``parts`` over the steps, in microseconds."""
    micros = sorted(sum(step[part] for part in parts) / 1e3 for step in steps)
    return {"median": statistics.median(micros), "p99": micros[(99 * len(micros) - 1) // 100]}


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    print("samples  part                       median us   p99 us")
    for batch_size in config.batch_sizes:
        steps = measure(config, batch_size, device)
        parts = list(dict.fromkeys(part for step in steps for part in step))
        others = [part for part in parts if part not in (LAUNCH, WAIT)]
        for name, summed in {**{p: [p] for p in parts}, OTHERS: others, "step": parts}.items():
            found = percentiles(steps, summed)
            row = {"bench": "host", "batch_per_gpu": batch_size, "part": name}
            rows.append({**row, "median_us": found["median"], "p99_us": found["p99"]})
            print(
                f"{batch_size:7d}  {name:26} {found['median']:9.1f} {found['p99']:8.1f}", flush=True
            )
    if config.output is not None:
        write_results(config.output, rows)


if __name__ == "__main__":
    main()
