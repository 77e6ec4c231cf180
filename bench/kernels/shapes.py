"""Compares lookups and updates of many shapes on one GPU with FBGEMM's, on the same ids.

``python -m bench.kernels.shapes`` prints for each shape the microseconds of all kernels of a
forward, and those of forward, backward and update; each over FBGEMM's in the same run; and the
fewest bytes that the work must move, a second, as a part of what a copy moves. Both libraries are
called as their users call them, so that each kernel that a call launches counts; gaps between
kernels do not. A figure is printed only if what it measures is right: vectors and updated rows are
compared with float64 first, in the same run, within the limits of rounding. With ``--dynamic`` a
million ids are looked up in dynamic tables that hold them, beside static ones.
"""

import argparse
import dataclasses
import functools
import gc
import importlib.util
import itertools
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from bench.data.workload import ADAGRAD, ADAM, ROWWISE_ADAGRAD, SGD
from bench.kernels.gpu_timing import copy_bytes_per_second, kernel_microseconds
from bench.kernels.shape import (
    Shape,
    ShapeBatch,
    excess,
    expected_rows,
    expected_vectors,
    floor_bytes,
    make_shape_batch,
)
from bench.kernels.shape_tables import (
    DynamicShape,
    FbgemmShape,
    ShapeTables,
    TorchembedShape,
)
from bench.report.result_file import Row, write_results
from torchembed.core.types import Pooling

NUM_BATCHES = 2
"""Batches that take turns, so that the cache holds less of the next one."""
_HALF, _BFLOAT = torch.float16, torch.bfloat16
_JAGGED = Shape(is_jagged=True)
_UNPOOLED = Shape(pooling=None, batch_size=1024, hotness=20)
_replace = dataclasses.replace

SHAPES = (
    *(_replace(_JAGGED, dim=dim) for dim in (16, 32, 64, 96, 128, 256, 512)),
    *(
        _replace(_JAGGED, dim=dim, rule=rule)
        for dim, rule in itertools.product((32, 64, 96, 128), (SGD, ADAGRAD, ADAM))
    ),
    _replace(_JAGGED, dim=256, rule=ADAGRAD),
    _replace(_JAGGED, dim=256, rule=ADAM),
    _replace(_JAGGED, dtype=_HALF),
    _replace(_JAGGED, dtype=_BFLOAT),
    _replace(_JAGGED, dim=256, dtype=_HALF),
    _replace(_JAGGED, dim=128, dtype=_BFLOAT, rule=ADAM),
    _replace(_JAGGED, hotness=50),
    _replace(_JAGGED, is_weighted=True),
    _replace(_JAGGED, dim=128, is_weighted=True),
    _replace(_JAGGED, pooling=Pooling.MEAN),
    Shape(batch_size=512, hotness=2),
    Shape(batch_size=512, hotness=2, dim=128),
    Shape(batch_size=2048, hotness=2, dim=256),
    Shape(batch_size=8192, hotness=1),
    Shape(batch_size=8192),
    _UNPOOLED,
    _replace(_UNPOOLED, dim=32),
    _replace(_UNPOOLED, dim=256),
    _replace(_UNPOOLED, dtype=_HALF),
    _replace(_UNPOOLED, dim=128, batch_size=512, hotness=50, rule=ADAM),
    _replace(_UNPOOLED, batch_size=2048, hotness=10, is_jagged=True),
)


DYNAMIC_SHAPES = tuple(
    Shape(dim=128, batch_size=4096, hotness=16, rule=rule) for rule in (ROWWISE_ADAGRAD, ADAGRAD)
)
"""Those that dynamic tables are measured with: 1,048,576 ids."""
STAGES: tuple[str, ...] = ("forward", "in_all")


def errors(
    shape: Shape, tables: ShapeTables, prepared: object, batch: ShapeBatch
) -> tuple[float, float]:
    """The largest errors over their limits of the vectors, and of the rows after the first step,
    which is done."""
    vectors = tables.look_up(prepared)
    of_vectors = excess(
        torch.cat([part.detach() for part in vectors]),
        expected_vectors(shape, batch, tables.weights()),
    )
    rows = expected_rows(shape, batch, tables.weights())
    tables.train(vectors, grads_of(shape, batch))
    return of_vectors, excess(rows.found(tables.weights()), rows.values)


def grads_of(shape: Shape, batch: ShapeBatch) -> list[torch.Tensor]:
    """The gradients of the vectors that a lookup gives."""
    return list(batch.grad.split(batch.num_ids)) if shape.pooling is None else [batch.grad]


def measure(shape: Shape, kind: type[ShapeTables], batches: list[ShapeBatch]) -> Row:
    """Check and time one library; without the times where it is wrong or cannot take the shape."""
    row: Row = {
        "bench": "shapes",
        "system": kind.name,
        "shape": f"dynamic, {shape.name}" if kind.is_dynamic else shape.name,
        "optimizer": shape.rule.name,
        "tables": f"{shape.num_tables} of {shape.num_rows} rows",
        "ids": "zipf",
    }
    reason = kind.why_not(shape)
    if reason is not None:
        return row | {"not_printed_because": reason}
    tables = kind(shape, batches[0].ids.device)
    prepared = [tables.prepare(batch) for batch in batches]
    grads = [grads_of(shape, batch) for batch in batches]
    of_vectors, of_rows = errors(shape, tables, prepared[0], batches[0])
    row["vectors_error_of_limit"], row["rows_error_of_limit"] = of_vectors, of_rows
    if not max(of_vectors, of_rows) <= 1:
        return row | {
            "not_printed_because": f"vectors and rows are wrong by {of_vectors:.1f} and "
            f"{of_rows:.1f} times what they may be"
        }

    def trained(number: int) -> None:
        tables.train(tables.look_up(prepared[number]), grads[number])

    numbers = range(len(batches))
    forwards = [functools.partial(tables.look_up, prepared[number]) for number in numbers]
    steps = [functools.partial(trained, number) for number in numbers]
    for stage, calls in zip(STAGES, (forwards, steps), strict=True):
        kernels = kernel_microseconds(calls)
        row[f"{stage}_microseconds"] = round(sum(kernels.values()), 2)
        row[f"{stage}_kernels"] = {name[:100]: round(us, 2) for name, us in kernels.items()}
    return row


def compare(ours: Row, theirs: Row | None, floors: Mapping[str, float], copy_rate: float) -> None:
    """Add to our row what its times are next to the bytes of ``floors`` and to FBGEMM's."""
    for stage in STAGES:
        microseconds = ours.get(f"{stage}_microseconds")
        if microseconds is None:
            continue
        ours[f"{stage}_floor_bytes"] = round(floors[stage])
        rate = floors[stage] / microseconds * 1e6
        ours[f"{stage}_bytes_per_second"] = rate
        ours[f"{stage}_copy_fraction"] = round(rate / copy_rate, 3)
        other = None if theirs is None else theirs.get(f"{stage}_microseconds")
        if other is not None:
            ours[f"{stage}_fbgemm_microseconds"] = other
            ours[f"{stage}_of_fbgemm"] = round(microseconds / other, 3)


HEADER = (
    f"{'':50}{'':18}{'forward':>32}{'in all':>32}\n{'shape':50}{'optimizer':18}"
    + f"{'us':>8}{'of copy':>8}{'FBGEMM':>8}{'ratio':>8}" * 2
)


def print_rows(rows: list[Row], prints_kernels: bool) -> None:
    """Print a line for each row of ours, and one for each row that is wrong or whose kernels are
    asked for."""
    for row in rows:
        if row["system"] != FbgemmShape.name:
            print_times(row)
        if "not_printed_because" in row:
            print(f"    {row['system']} is not shown: {row['not_printed_because']}", flush=True)
        elif prints_kernels:
            for stage in STAGES:
                kernels = sorted(row[f"{stage}_kernels"].items(), key=lambda pair: -pair[1])
                listed = ", ".join(f"{short_name(name)} {us:.1f}" for name, us in kernels)
                print(f"    {row['system']} {stage}: {listed}", flush=True)


def print_times(ours: Row) -> None:
    """Print a line of the table."""
    line = f"{ours['shape']:50}{ours['optimizer']:18}"
    for stage in STAGES:
        for key, form in (
            ("microseconds", "8.1f"),
            ("copy_fraction", "8.2f"),
            ("fbgemm_microseconds", "8.1f"),
            ("of_fbgemm", "8.2f"),
        ):
            value = ours.get(f"{stage}_{key}")
            line += f"{'-':>8}" if value is None else f"{value:{form}}"
    print(line, flush=True)


def short_name(kernel: str) -> str:
    """The name of a kernel without namespaces, types of arguments and of templates."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", name)[0].split("::")[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="measure the shapes whose names match this expression")
    parser.add_argument("--dynamic", action="store_true", help="dynamic tables beside static ones")
    parser.add_argument("--alone", action="store_true", help="leave FBGEMM out")
    parser.add_argument("--kernels", action="store_true", help="print the time of each kernel")
    parser.add_argument("--output", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    device, copy_rate = torch.device("cuda"), copy_bytes_per_second()
    print(f"{torch.cuda.get_device_name()}, a copy moves {copy_rate / 1e12:.2f} TB/s")
    kinds: list[type[ShapeTables]] = [TorchembedShape]
    if arguments.dynamic:
        kinds.append(DynamicShape)
    if importlib.util.find_spec("fbgemm_gpu") is None:
        print("FBGEMM is not installed, so it is not shown")
    elif not arguments.alone:
        kinds.append(FbgemmShape)
    print(HEADER)
    rows: list[Row] = []
    for shape in DYNAMIC_SHAPES if arguments.dynamic else SHAPES:
        if arguments.only and not re.search(arguments.only, f"{shape.name}, {shape.rule.name}"):
            continue
        batches = [make_shape_batch(shape, number, device) for number in range(NUM_BATCHES)]
        measured = []
        for kind in kinds:
            measured.append(measure(shape, kind, batches))
            gc.collect()
            torch.cuda.empty_cache()
        floors = dict(zip(STAGES, floor_bytes(shape, batches), strict=True))
        theirs = measured[-1] if kinds[-1] is FbgemmShape else None
        for ours in measured[: -1 if theirs else None]:
            compare(ours, theirs, floors, copy_rate)
        print_rows(measured, arguments.kernels)
        rows += measured
        if arguments.output is not None:  # each time, so that what was measured outlives an error
            write_results(arguments.output, rows)


if __name__ == "__main__":
    main()
