"""Compares lookups and row updates on one GPU with FBGEMM's, on the same ids and weights.

``python -m bench.kernels.gpu`` takes DLRM-DCNv2's tables, cut to 8 M rows, and prints the
microseconds of each stage, the bytes that it must move by the second, as a part of what a copy
moves, an update's time over that of reading and writing its rows alone, and our time over FBGEMM's.
Times are sums over a stage's kernels, so that neither library's host counts; ours as one CUDA
graph, gaps included, follow them. A figure is printed only if what it measures is right:
vectors and rows are compared with float64 first, in the same run, and our backward must repeat its
bits.
"""

import argparse
import dataclasses
import gc
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.data.workload import (
    ADAGRAD,
    ROWWISE_ADAGRAD,
    Batch,
    Rule,
    Workload,
    error_of,
    make_batch,
    true_changes,
    true_pooled,
)
from bench.kernels.gpu_tables import FbgemmTables, Stages, TorchembedTables
from bench.kernels.gpu_timing import copy_bytes_per_second, graph_microseconds, kernel_microseconds
from bench.report.result_file import Row, write_results
from torchembed.data import MLPERF_HOTNESS, MLPERF_TABLE_SIZES

DIM, MAX_ROWS = 128, 8_000_000
BATCH_SIZES = (512, 2048, 8192)
RULES = (ROWWISE_ADAGRAD, ADAGRAD)
NUM_BATCHES = {512: 6, 2048: 4, 8192: 3}
"""Batches that take turns, so that the cache holds nothing of the next one."""
MAX_FORWARD_ERROR = 2**-8
"""Error over the largest value: vectors are rounded to bfloat16."""
MAX_UPDATE_ERROR = 1e-5
"""Error over the largest value: room for the rounding of a hot row's thousands of summands in
float32."""


def on_gpu(batch: Batch) -> Batch:
    """With the gradient as bfloat16 holds it."""
    grad = batch.grad.cuda().bfloat16().float()
    return Batch([ids.cuda() for ids in batch.ids], grad)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Tables, and what is compared on them."""

    workload: Workload
    rule: Rule
    weight: Tensor
    states: list[Tensor]
    """Each table's optimizer state, of each library that has its own."""

    def tables(self) -> list[Tensor]:
        return list(self.weight.split(self.workload.num_rows))

    def reset_states(self) -> None:
        for state in self.states:
            state.fill_(self.rule.initial_accumulator)


def forward_error(setting: Setting, stages: Stages, batch: Batch) -> float:
    with torch.no_grad():
        found = stages.forward()
    worst = 0.0
    for feature, (weight, ids) in enumerate(zip(setting.tables(), batch.ids, strict=True)):
        columns = slice(feature * DIM, (feature + 1) * DIM)
        true = true_pooled([weight], Batch([ids], batch.grad))
        worst = max(worst, error_of(found[:, columns], true))
    return worst


def updated_rows(setting: Setting, stages: Stages, rows: Sequence[Tensor]) -> list[Tensor]:
    """The rows after one backward from fresh states; the weights are then as they were."""
    before = [table[of_table] for table, of_table in zip(setting.tables(), rows, strict=True)]
    setting.reset_states()
    stages.backward()
    after = [table[of_table] for table, of_table in zip(setting.tables(), rows, strict=True)]
    for table, of_table, values in zip(setting.tables(), rows, before, strict=True):
        table[of_table] = values
    return after


def backward_error(setting: Setting, stages: Stages, batch: Batch, repeats_bits: bool) -> float:
    rows = [ids.unique() for ids in batch.ids]
    after = updated_rows(setting, stages, rows)
    if repeats_bits:
        again = updated_rows(setting, stages, rows)
        if not all(torch.equal(*pair) for pair in zip(after, again, strict=True)):
            return torch.inf
        del again
    worst = 0.0
    for feature, found in enumerate(after):
        touched, changes = true_changes(batch, feature, setting.rule)
        true = changes.add_(setting.tables()[feature][touched])
        worst = max(worst, error_of(found, true))
    return worst


def floor_bytes(workload: Workload, rule: Rule, batches: Sequence[Batch]) -> dict[str, float]:
    """The bytes that each stage must move, mean over ``batches``; see the kernels' modules."""
    touched = sum(ids.unique().numel() for batch in batches for ids in batch.ids) / len(batches)
    vectors = workload.batch_size * len(workload.hotness) * DIM * 2
    state_bytes = 4 * DIM if rule == ADAGRAD else 4
    return {
        "forward": touched * DIM * 4 + workload.num_ids * 4 + vectors,
        "update": 2 * touched * (DIM * 4 + state_bytes) + workload.num_ids * 8 + vectors,
    }


def measure(
    setting: Setting,
    ours: TorchembedTables,
    theirs: FbgemmTables | None,
    copy_rate: float,
) -> list[Row]:
    """Check and time each stage on one workload, print it, and return its rows of results."""
    workload, rule = setting.workload, setting.rule
    numbers = range(NUM_BATCHES[workload.batch_size])
    batches = [on_gpu(make_batch(workload, number)) for number in numbers]
    floors = floor_bytes(workload, rule, batches)
    contenders: list[tuple[str, list[Stages]]] = [
        (tables.name, [tables.stages(workload, batch) for batch in batches])
        for tables in (ours, theirs)
        if tables is not None
    ]
    rows: list[Row] = []
    times: dict[tuple[str, str], float] = {}
    for name, stages in contenders:
        is_ours = name == ours.name
        errors = {
            "forward": (forward_error(setting, stages[0], batches[0]), MAX_FORWARD_ERROR),
            "backward": (
                backward_error(setting, stages[0], batches[0], is_ours),
                MAX_UPDATE_ERROR,
            ),
        }
        for stage in ("forward", "backward", "update"):
            error, limit = errors["forward" if stage == "forward" else "backward"]
            if not error <= limit:
                print(f"{name}: {stage} is wrong by {error:.1e} and is not shown", flush=True)
                continue
            calls = [getattr(of_batch, stage) for of_batch in stages]
            if calls[0] is None:
                continue
            with torch.set_grad_enabled(not is_ours):
                kernels = kernel_microseconds(calls)
            if stage == "backward" and not is_ours:
                # The vectors are looked up again before each backward.
                kernels = {k: us for k, us in kernels.items() if not _is_forward(k)}
            row = {
                "bench": "kernels",
                "system": name,
                "stage": stage,
                "batch_per_gpu": workload.batch_size,
                "ids": workload.ids,
                "optimizer": None if stage == "forward" else rule.name,
                "precision": "fp32 rows, bf16 vectors",
                "microseconds": round(sum(kernels.values()), 2),
                "error": error,
                "kernels": {kernel[:100]: round(us, 2) for kernel, us in kernels.items()},
            }
            times[name, stage] = row["microseconds"]
            if is_ours:
                with torch.no_grad():
                    row["microseconds_in_graph"] = round(graph_microseconds(calls), 2)
            if is_ours and stage == "update":
                alone = sum(kernel_microseconds([s.touch for s in stages if s.touch]).values())
                row["rows_alone_microseconds"] = round(alone, 2)
                row["of_rows_alone"] = round(row["microseconds"] / alone, 3)
            if stage in floors:
                rate = floors[stage] / row["microseconds"] * 1e6
                row["bytes_per_second"], row["copy_fraction"] = rate, rate / copy_rate
            rows.append(row)
    update = [
        us for kernel, us in _kernels(rows, FbgemmTables.name, "backward") if _is_update(kernel)
    ]
    if update:
        times[FbgemmTables.name, "update"] = sum(update)
    for row in rows:
        other = times.get((FbgemmTables.name, row["stage"]))
        if row["system"] == ours.name:
            if other is not None:
                row["fbgemm_microseconds"] = round(other, 2)
                row["of_fbgemm"] = round(row["microseconds"] / other, 3)
            print_row(row)
    return rows


def _kernels(rows: Sequence[Row], system: str, stage: str) -> list[tuple[str, float]]:
    return [
        pair
        for row in rows
        if (row["system"], row["stage"]) == (system, stage)
        for pair in row["kernels"].items()
    ]


def _is_forward(kernel: str) -> bool:
    return "forward" in kernel and "embedding" in kernel


def _is_update(kernel: str) -> bool:
    """True where a kernel of FBGEMM's backward reads the gradient."""
    return "per_row" in kernel


HEADER = (
    f"{'stage':9}{'optimizer':18}{'batch':>6}  {'ids':8}{'us':>9}{'in graph':>10}{'TB/s':>7}"
    f"{'of copy':>9}{'/rows alone':>12}{'FBGEMM us':>11}{'ours/FBGEMM':>13}"
)


def print_row(row: Row) -> None:
    def optional(key: str, form: str, width: int, scale: float = 1.0) -> str:
        return f"{row[key] * scale:{width}{form}}" if key in row else f"{'-':>{width}}"

    print(
        f"{row['stage']:9}{row['optimizer'] or '':18}{row['batch_per_gpu']:>6}  {row['ids']:8}"
        f"{row['microseconds']:9.1f}{optional('microseconds_in_graph', '.1f', 10)}"
        f"{optional('bytes_per_second', '.2f', 7, 1e-12)}{optional('copy_fraction', '.2f', 9)}"
        f"{optional('of_rows_alone', '.2f', 12)}"
        f"{optional('fbgemm_microseconds', '.1f', 11)}{optional('of_fbgemm', '.2f', 13)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--output", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    num_rows = tuple(min(size, MAX_ROWS) for size in MLPERF_TABLE_SIZES)
    copy_rate = copy_bytes_per_second()
    has_fbgemm = importlib.util.find_spec("fbgemm_gpu") is not None
    print(f"{torch.cuda.get_device_name()}, a copy moves {copy_rate / 1e12:.2f} TB/s")
    if not has_fbgemm:
        print("FBGEMM is not installed, so it is not shown")
    print(HEADER)
    rows: list[Row] = []
    for rule in RULES:
        workload = Workload(
            dim=DIM, num_rows=num_rows, hotness=MLPERF_HOTNESS, batch_size=1, ids="uniform"
        )
        theirs = FbgemmTables(workload, rule) if has_fbgemm else None
        shape = (sum(num_rows), DIM)
        weight = torch.empty(shape, device="cuda") if theirs is None else theirs.weight
        weight.uniform_(-0.5, 0.5)
        # What FBGEMM keeps for each element lies in one piece, table after table, and serves both.
        if theirs is not None and rule == ADAGRAD:
            state = theirs.states[0].as_strided(shape, (DIM, 1))
        else:
            state = torch.empty(shape if rule == ADAGRAD else shape[0], device="cuda")
        states = [state, *([] if theirs is None or rule == ADAGRAD else theirs.states)]
        ours = TorchembedTables(workload, weight, state, rule)
        for batch_size in arguments.batch_sizes:
            for ids in ("uniform", "zipf"):
                now = dataclasses.replace(workload, batch_size=batch_size, ids=ids)
                setting = Setting(workload=now, rule=rule, weight=weight, states=states)
                rows += measure(setting, ours, theirs, copy_rate)
        del weight, state, states, ours, theirs
        gc.collect()
        torch.cuda.empty_cache()
    if arguments.output is not None:
        write_results(arguments.output, rows)


if __name__ == "__main__":
    main()
