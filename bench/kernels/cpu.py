"""Compares lookups and updates on the CPU with ``nn.EmbeddingBag`` and FBGEMM, on the same ids.

``python -m bench.kernels.cpu`` prints milliseconds for a batch. The libraries take turns within one
run, on the same batches and from the same weights, and a figure is printed only if what it measures
is right: pooled vectors and updated rows are compared with float64 first.
"""

import dataclasses
import gc
import importlib.util
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import tyro
from torch import Tensor

from bench.data.workload import (
    RULES,
    Batch,
    Rule,
    Workload,
    error_of,
    make_batch,
    true_changes,
    true_pooled,
)
from bench.kernels.cpu_tables import FbgemmTables, Tables, TorchembedTables, TorchTables
from torchembed.data import MLPERF_HOTNESS, MLPERF_TABLE_SIZES

MAX_ERROR = 1e-5
"""Error over the largest value: room for the rounding of a hot row's thousands of summands in
float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the measurements."""

    dims: tuple[int, ...] = (16, 128)
    one_hot_batch_size: int = 2048
    """Samples of a batch with one id a bag."""
    multi_hot_batch_size: int = 256
    """Samples of a batch with MLPerf's hotness, 214 ids a sample."""
    max_rows: int = 50_000
    """MLPerf's table sizes are cut to this."""
    num_batches: int = 4
    """Batches, which are taken in turn."""
    seconds: float = 0.7
    """Time to measure each line for."""
    num_threads: int | None = None
    """Threads of each library; torch's choice where None."""

    def workloads(self) -> list[Workload]:
        num_rows = tuple(min(size, self.max_rows) for size in MLPERF_TABLE_SIZES)
        shapes = (
            (self.one_hot_batch_size, (1,) * len(num_rows)),
            (self.multi_hot_batch_size, MLPERF_HOTNESS),
        )
        return [
            Workload(dim=dim, num_rows=num_rows, hotness=hotness, batch_size=batch_size, ids=ids)
            for dim, (batch_size, hotness), ids in itertools.product(
                self.dims, shapes, ("zipf", "uniform")
            )
        ]


def milliseconds(calls: Sequence[Callable[[int], float]], seconds: float) -> list[float]:
    """The lower quartile of the seconds that each of ``calls`` returns, in milliseconds.

    The calls take turns, so that what else the machine does disturbs all of them alike.
    """
    times: list[list[float]] = [[] for _ in calls]
    gc.collect()
    gc.disable()
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        if turn >= 5 and time.perf_counter() >= end:
            break
        for call, seen in zip(calls, times, strict=True):
            seen.append(call(turn))
    gc.enable()
    return [1e3 * statistics.quantiles(seen, n=4)[0] for seen in times]


def time_lookups(tables: Tables, batches: list[Batch]) -> Callable[[int], float]:
    """A call that looks one of ``batches`` up and returns the seconds it took."""
    prepared = [tables.prepare(batch) for batch in batches]

    def call(turn: int) -> float:
        batch = prepared[turn % len(prepared)]
        with torch.no_grad():
            start = time.perf_counter()
            tables.look_up(batch)
            return time.perf_counter() - start

    return call


def time_training(tables: Tables, batches: list[Batch]) -> Callable[[int], float]:
    """A call that trains on one of ``batches`` and returns the seconds it took after the lookup."""
    prepared = [tables.prepare(batch) for batch in batches]

    def call(turn: int) -> float:
        batch = prepared[turn % len(prepared)]
        result = tables.look_up(batch)
        start = time.perf_counter()
        tables.train(result, batch)
        return time.perf_counter() - start

    return call


@torch.no_grad()
def lookup_error(tables: Tables, initial: list[Tensor], batch: Batch) -> float:
    """The error of the pooled vectors."""
    pooled = tables.pooled(tables.look_up(tables.prepare(batch)))
    return error_of(pooled, true_pooled(initial, batch))


def training_error(tables: Tables, initial: list[Tensor], batch: Batch, rule: Rule) -> float:
    """The largest error of a table's touched rows after a first step."""
    prepared = tables.prepare(batch)
    tables.train(tables.look_up(prepared), prepared)
    errors = []
    for feature, weight in enumerate(tables.weights()):
        rows, changes = true_changes(batch, feature, rule)
        errors.append(error_of(weight.detach()[rows], initial[feature][rows].double() + changes))
    return max(errors)


class Report:
    """Prints a table line by line: ours first, then each other library and its time over ours."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        ours, *others = names
        columns = "".join(f"{name:>16}   times" for name in others)
        print(
            f"{'milliseconds':26}{'dim':>4}{'ids/bag':>9}{'batch':>7}  {'ids':7}{ours:>11}{columns}"
        )

    def line(self, what: str, workload: Workload, figures: dict[str, float]) -> None:
        ours = figures.get(self._names[0], math.nan)
        least, most = min(workload.hotness), max(workload.hotness)
        text = (
            f"{what:26}{workload.dim:>4}{least if least == most else f'{least}-{most}':>9}"
            f"{workload.batch_size:>7}  {workload.ids:7}{ours:>11.2f}"
        )
        for name in self._names[1:]:
            figure = figures.get(name)
            text += (
                f"{'-':>16}{'':8}" if figure is None else f"{figure:>16.2f}{figure / ours:>7.1f}x"
            )
        print(text, flush=True)


def measure(
    config: Config, workload: Workload, rule: Rule, kinds: Sequence[type[Tables]], report: Report
) -> None:
    """Check and time one rule on one workload, and lookups too if it is the first rule."""
    generator = torch.Generator().manual_seed(0)
    initial = [
        torch.rand(num_rows, workload.dim, generator=generator) - 0.5
        for num_rows in workload.num_rows
    ]
    batches = [make_batch(workload, number) for number in range(config.num_batches)]
    contenders = [kind(workload, initial, rule) for kind in kinds if rule in kind.rules]

    def time_right(
        what: str,
        error: Callable[[Tables], float],
        timer: Callable[[Tables, list[Batch]], Callable[[int], float]],
    ) -> None:
        right = []
        for tables in contenders:
            found = error(tables)
            if found <= MAX_ERROR:
                right.append(tables)
            else:
                print(f"{tables.name}: {what} is wrong by {found:.1e} and is not shown")
        calls = [timer(tables, batches) for tables in right]
        times = milliseconds(calls, config.seconds)
        report.line(what, workload, {t.name: ms for t, ms in zip(right, times, strict=True)})

    if rule == RULES[0]:
        time_right("lookup", lambda t: lookup_error(t, initial, batches[0]), time_lookups)
    time_right(
        f"backward, {rule.name}",
        lambda t: training_error(t, initial, batches[0], rule),
        time_training,
    )


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    kinds: list[type[Tables]] = [TorchembedTables, TorchTables]
    if importlib.util.find_spec("fbgemm_gpu") is None:
        print("FBGEMM is not installed, so it is not shown")
    else:
        kinds.append(FbgemmTables)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; torchembed's kernel: "
        f"{torch.ops.torchembed_native.instruction_set()}"
    )
    report = Report([kind.name for kind in kinds])
    for workload in config.workloads():
        for rule in RULES:
            measure(config, workload, rule, kinds, report)


if __name__ == "__main__":
    main()
