"""Compares the planner's predictions for kernels and wires with measurements.

``python -m bench.planning.costs`` compares the rows of ``bench.kernels.gpu`` and
``bench.step.train_step`` and those of wires that are in ``bench/results``. ``torchrun
--nproc-per-node N -m bench.planning.costs --output wires.json`` measures the wires first, on GPUs,
each collective in a CUDA graph and its result checked. Fitted figures are printed for
``torchembed.sharding.planning.topology`` and ``costs``.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.data.dlrm_dcnv2 import distinct_ids
from bench.data.workload import ADAGRAD
from bench.kernels.gpu_timing import graph_microseconds
from bench.planning.step_costs import predicted_of_row
from bench.report.result_file import Row, write_results
from torchembed import optim
from torchembed.data import MLPERF_HOTNESS, MLPERF_TABLE_SIZES
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding import TableUse, Topology, WirePrecision
from torchembed.sharding.planning.costs import CostModel
from torchembed.sharding.planning.load_seconds import ALL_REDUCE_EXCHANGES
from torchembed.sharding.planning.loads import Load
from torchembed.sharding.planning.plan import Placement, place_table
from torchembed.sharding.planning.topology import GPUS, Hardware
from torchembed.tables import TableSpec

RESULTS = Path(__file__).parents[1] / "results"
MAX_ROWS, DIM = 8_000_000, 128
"""Rows and columns of the tables of ``bench.kernels.gpu``."""
WIRE_BYTES = (3 << 20, 13 << 20, 52 << 20, 104 << 20)
"""Bytes that each rank sends in a collective."""


class Prediction(NamedTuple):
    """One measured figure, and what the cost model says of it."""

    what: str
    num_bytes: float
    """As costs count them: through memory, or over a rank's wires in one direction; 0 where there
    are other terms."""
    measured: float
    """Seconds."""
    predicted: float


def predictions(rows: Iterable[Row]) -> list[Prediction]:
    """Predict each of ``rows`` that the cost model covers."""
    found = []
    for row in rows:
        hardware = next((gpu for gpu in GPUS if gpu.name in row.get("gpu", "")), None)
        if hardware is None or row.get("system", "torchembed") != "torchembed":
            continue
        if row["bench"] == "wires":
            found.append(_of_wire(row, hardware))
        elif row["bench"] == "kernels" and row["stage"] != "backward":
            found.append(_of_kernel(row, hardware))
        elif "alone_ms" in row:
            found += _of_step(row, hardware)
    return found


def _of_kernel(row: Row, hardware: Hardware) -> Prediction:
    topology = Topology.of_hardware(hardware, ranks_per_node=1)
    names = [f"cat_{number}" for number in range(len(MLPERF_HOTNESS))]
    kind = optim.Adagrad if row["optimizer"] == ADAGRAD.name else optim.RowwiseAdagrad
    model = CostModel(
        topology=topology,
        batch_size=row["batch_per_gpu"],
        rule=UpdateRule(kind=kind.kind),
        wire=WirePrecision(),
        fixed_hotness=True,
        hotness=dict(zip(names, MLPERF_HOTNESS, strict=True)),
        distinct_ids=distinct_ids(row["ids"], row["batch_per_gpu"], MAX_ROWS),
    )
    loads = np.zeros(len(Load))
    for name, num_rows in zip(names, MLPERF_TABLE_SIZES, strict=True):
        spec = TableSpec(name=name, num_rows=min(num_rows, MAX_ROWS), dim=DIM)
        use = TableUse(spec=spec, features=(name,), output_dtype=torch.bfloat16)
        plan = place_table(name, spec, Placement.TABLE_WISE, (0,))
        loads += model.table_loads(use, plan)[0][0]
    if row["stage"] == "forward":
        num_bytes = float(loads[Load.LOOKUP])
        seconds = model.lookup_seconds(num_bytes, 1)
    else:
        num_bytes = float(loads[Load.UPDATE])
        seconds = model.update_seconds(num_bytes, 1)
    what = f"{hardware.name} {row['stage']} {row['batch_per_gpu']} {row['ids']}"
    what = f"{what} {row['optimizer'] or ''}"
    return Prediction(what, num_bytes, row["microseconds"] * 1e-6, seconds)


def _of_wire(row: Row, hardware: Hardware) -> Prediction:
    away = (row["num_gpus"] - 1) / row["num_gpus"]
    passes, exchanges = (2, ALL_REDUCE_EXCHANGES) if row["collective"] == "all-reduce" else (1, 1)
    num_bytes = passes * away * row["bytes"]
    topology = Topology.of_hardware(hardware, ranks_per_node=row["num_gpus"])
    seconds = num_bytes / topology.intra_node_bandwidth
    seconds += exchanges * topology.collective_seconds
    what = f"{row['num_gpus']} {hardware.name} {row['collective']} {row['bytes'] / 2**20:.0f} MiB"
    return Prediction(what, num_bytes, row["microseconds"] * 1e-6, seconds)


def _of_step(row: Row, hardware: Hardware) -> list[Prediction]:
    """Each measured stage of a step, one after the other."""
    what = f"{row['num_gpus']} {hardware.name} step {row['batch_per_gpu']} {row['ids']}"
    return [
        Prediction(f"{what} {stage}", 0.0, row["alone_ms"][stage] * 1e-3, milliseconds * 1e-3)
        for stage, milliseconds in predicted_of_row(row).items()
        if milliseconds and stage in row["alone_ms"]
    ]


def fitted(of_stage: Sequence[Prediction]) -> tuple[float, float]:
    """Seconds and bytes a second, so that seconds and bytes over them give what was measured, with
    the least squares of relative errors."""
    measured = np.array([each.measured for each in of_stage])
    terms = np.array([[1.0, each.num_bytes] for each in of_stage]) / measured[:, None]
    (fixed, a_byte), *_ = np.linalg.lstsq(terms, np.ones(len(measured)), rcond=None)
    return float(fixed), 1 / float(a_byte)


def measured_wires() -> list[Row]:
    """All-to-alls and all-reduces over all ranks, on the first one; None of them on the others."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    rows: list[Row] = []
    for num_bytes in WIRE_BYTES:
        count = num_bytes // 4 // num_ranks * num_ranks
        source = torch.arange(num_ranks, device="cuda").repeat_interleave(count // num_ranks)
        source = (source + rank * num_ranks).float()
        target = torch.empty_like(source)

        def all_to_all(target: Tensor = target, source: Tensor = source) -> None:
            dist.all_to_all_single(target, source)

        def all_reduce(target: Tensor = target) -> None:
            dist.all_reduce(target)

        all_to_all()
        expected = torch.arange(num_ranks, device="cuda") * num_ranks + rank
        is_right = {"all-to-all": bool((target.view(num_ranks, -1) == expected[:, None]).all())}
        target.fill_(rank + 1.0)
        all_reduce()
        is_right["all-reduce"] = bool((target == num_ranks * (num_ranks + 1) / 2).all())
        target.zero_()
        for name, call in (("all-to-all", all_to_all), ("all-reduce", all_reduce)):
            if not is_right[name]:
                raise AssertionError(f"{name} of {num_bytes} bytes gave something wrong")
            rows.append(
                {
                    "bench": "wires",
                    "collective": name,
                    "gpu": torch.cuda.get_device_name(),
                    "num_gpus": num_ranks,
                    "bytes": 4 * count,
                    "microseconds": _slowest(call),
                }
            )
    return rows


def _slowest(call: Callable[[], object]) -> float:
    """Microseconds of the slowest rank; ten calls a graph, so that ranks need not start at once."""

    def ten() -> None:
        for _ in range(10):
            call()

    dist.barrier()
    mine = torch.tensor(graph_microseconds([ten]) / 10, dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine)


def print_predictions(found: Sequence[Prediction]) -> None:
    for each in found:
        num_bytes = f"{each.num_bytes / 1e6:9.1f} MB" if each.num_bytes else ""
        print(
            f"{each.what:40} {num_bytes:12}  measured {each.measured * 1e6:8.1f} us"
            f"  predicted {each.predicted * 1e6:8.1f} us ({each.predicted / each.measured:.2f})"
        )
    for stage in ("forward", "update", "all-"):
        of_stage = [each for each in found if stage in each.what and each.num_bytes]
        if len(of_stage) > 1:
            fixed, rate = fitted(of_stage)
            print(f"{stage:8} fits {fixed * 1e6:.1f} us + bytes / {rate:.3g} a second")
    if found:
        errors = [abs(each.predicted / each.measured - 1) for each in found]
        print(f"off by {statistics.median(errors):.0%} in the middle, {max(errors):.0%} at most")


def stored_rows(results: Path) -> list[Row]:
    """The rows of all files of a folder, each with its GPU."""
    rows = []
    for file in sorted(results.glob("*.json")):
        stored = json.loads(file.read_text())
        hardware = stored["hardware"]
        # Results of a CPU name no GPU.
        gpu = hardware if isinstance(hardware, str) else hardware["gpu"] or "none"
        rows += [{"gpu": gpu} | row for row in stored["rows"]]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of measured rows")
    parser.add_argument("--output", type=Path, help="JSON to write the measured wires to")
    arguments = parser.parse_args()
    rows = stored_rows(arguments.results)
    is_first = True
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
        is_first, wires = dist.get_rank() == 0, measured_wires()
        if is_first and arguments.output is not None:
            write_results(arguments.output, wires)
        rows = [*(row for row in rows if row["bench"] != "wires"), *wires]
        # Graphs that hold collectives are gone by now.
        dist.destroy_process_group()
    if is_first:
        print_predictions(predictions(rows))


if __name__ == "__main__":
    main()
