"""Predictions of the planner's cost model for the stages of DLRM-DCNv2's step."""

import dataclasses

import torch

from bench.data import dlrm_dcnv2 as workload
from bench.report.result_file import Row
from torchembed import optim, plan_embeddings
from torchembed.modules.sharded.model_plan import table_uses
from torchembed.sharding import Planner, PlanReport, TableConstraint, Topology, WirePrecision
from torchembed.sharding.planning.plan import Placement, ShardingPlan, place_table
from torchembed.sharding.planning.topology import GPUS

OF_TABLES = {
    "adagrad": optim.Adagrad,
    "rowwise_adagrad": optim.RowwiseAdagrad,
    "sgd": optim.SGD,
}
WIRES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp32": torch.float32}
UNDER_AUTOCAST = ("bf16", "fp8")
"""Precisions of a dense part that is under ``torch.autocast`` in bfloat16."""
NO_BOUND = 1 << 60
"""Bytes of memory."""


def make_planner(
    batch_size: int,
    ids: str,
    optimizer: str,
    precision: str,
    max_rows: int | None,
    row_factor: int = 1,
) -> Planner:
    """For a row of ``bench.step.train_step``, with tables ``row_factor`` times as large."""
    return Planner(
        batch_size=batch_size,
        hotness=dict(zip(workload.KEYS, workload.HOTNESS, strict=True)),
        distinct_ids=workload.distinct_ids(ids, batch_size, max_rows, row_factor),
        optimizer=OF_TABLES[optimizer],
        autocast=torch.bfloat16 if precision in UNDER_AUTOCAST else None,
        fixed_hotness=True,
    )


def wire_precision(wire: str) -> WirePrecision:
    """Make the precision ``wire`` for vectors, their gradients and dense gradients, which are sent
    in 16 bits at least."""
    dtype = WIRES[wire]
    dense = torch.bfloat16 if wire == "fp8" else dtype
    return WirePrecision(forward=dtype, backward=dtype, dense=dense)


def predicted_ms(report: PlanReport) -> dict[str, float]:
    """Milliseconds of the slowest rank, by the stages of :mod:`bench.step.stages`."""
    ranks, dense = report.ranks, report.dense
    assert dense is not None
    seconds = {
        "exchange": max(r.ids_seconds + r.vectors_seconds + r.gradients_seconds for r in ranks),
        "lookup": max(rank.lookup_seconds for rank in ranks),
        "dense forward": dense.forward_seconds,
        "dense backward": dense.backward_seconds,
        "mean": ranks[0].all_reduce_seconds + dense.mean_seconds,
        "row update": max(rank.update_seconds for rank in ranks),
        "dense update": dense.update_seconds,
    }
    return {stage: 1e3 * value for stage, value in seconds.items()}


def placements_of(plan: ShardingPlan) -> dict[str, str]:
    """The plan in short, for a row of results: of each table its placement and ranks."""
    return {
        table.table: " ".join([table.placement.value, *(str(s.rank) for s in table.shards)])
        for table in plan.tables
    }


def predicted_of_row(row: Row) -> dict[str, float]:
    """Predict a measured row with today's cost model and the plan of the measurement."""
    hardware = next(gpu for gpu in GPUS if gpu.name in row["gpu"])
    topology = Topology.of_hardware(hardware, ranks_per_node=row["num_gpus"])
    meta, precision = torch.device("meta"), row["precision"]
    model = workload.make_model(
        workload.table_configs(row["max_rows"]),
        workload.DENSE_SIZES,
        table_device=meta,
        device=meta,
        seed=0,
        output_dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
    )
    uses = table_uses(model)
    constraints = {}
    for name, words in row["placements"].items():
        placement, *ranks = words.split()
        plan = place_table(name, uses[name].spec, Placement(placement), list(map(int, ranks)))
        constraints[name] = TableConstraint(exact=plan)
    planner = make_planner(
        row["batch_per_gpu"], row["ids"], row["optimizer"], precision, row["max_rows"]
    )
    planner = dataclasses.replace(
        planner,
        topology=dataclasses.replace(topology, memory_bytes=NO_BOUND),
        constraints=constraints,
    )
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        report = plan_embeddings(model, planner, wire=wire_precision(row["wire"]))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return predicted_ms(report)
