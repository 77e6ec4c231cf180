"""The tasks of a captured step of DLRM-DCNv2, with the planner's costs of each."""

import dataclasses
from typing import NamedTuple

import torch

from bench.data import dlrm_dcnv2 as workload
from bench.planning.step_costs import make_planner, predicted_ms, wire_precision
from bench.simulate.schedule import Engine, Task
from torchembed import plan_embeddings
from torchembed.sharding import PlanReport, Topology
from torchembed.sharding.planning.load_seconds import ALL_REDUCE_EXCHANGES
from torchembed.sharding.planning.topology import Hardware

SORT_SECONDS, SORT_SECONDS_PER_ID = 30e-6, 0.13e-9
"""Finding the rows and runs of a batch's ids, fixed and for each id that a rank receives: fitted to
the stage ``ids`` of ``bench/results/step_stages_2_h200.json``."""
MOST_PARTS = 4
"""Parts of the dense gradients, each of which is averaged and updated as soon as it is there; fewer
where they have fewer buckets."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A step to simulate, in 16-bit precision over float32 tables."""

    hardware: Hardware
    num_gpus: int
    gpus_per_node: int = 8
    batch_per_gpu: int = 8192
    ids: str = "uniform"
    max_rows: int | None = None
    """Tables are cut to this."""
    row_factor: int = 1
    """Rows of each table, as a multiple of MLPerf's."""
    optimizer: str = "adagrad"
    wire: str = "bf16"

    @property
    def topology(self) -> Topology:
        """The GPUs, on as few nodes as hold them.

        Raises:
            ValueError: where they do not fill nodes.
        """
        per_node = min(self.num_gpus, self.gpus_per_node)
        num_nodes, left = divmod(self.num_gpus, per_node)
        if left:
            raise ValueError(
                f"num_gpus must be a multiple of the {per_node} GPUs of a node, got {self.num_gpus}"
            )
        return Topology.of_hardware(self.hardware, ranks_per_node=per_node, num_nodes=num_nodes)


class SimulatedStep(NamedTuple):
    """The tasks of the slowest rank, and the plan that they follow from."""

    tasks: list[Task]
    report: PlanReport


def simulated_step(setting: Setting) -> SimulatedStep:
    """Plan the tables of ``setting``, and make the tasks of its step.

    Raises:
        ValueError: where the tables do not fit the GPUs, as the planner says it.
    """
    meta = torch.device("meta")
    model = workload.make_model(
        workload.table_configs(setting.max_rows, row_factor=setting.row_factor),
        workload.DENSE_SIZES,
        table_device=meta,
        device=meta,
        seed=0,
        output_dtype=torch.bfloat16,
    )
    planner = dataclasses.replace(
        make_planner(
            setting.batch_per_gpu,
            setting.ids,
            setting.optimizer,
            "bf16",
            setting.max_rows,
            setting.row_factor,
        ),
        topology=setting.topology,
    )
    report = plan_embeddings(model, planner, wire=wire_precision(setting.wire))
    return SimulatedStep(_tasks(setting, report), report)


def _tasks(setting: Setting, report: PlanReport) -> list[Task]:
    stages = {name: ms * 1e-3 for name, ms in predicted_ms(report).items()}
    ranks, dense = report.ranks, report.dense
    assert dense is not None
    num_ids = setting.batch_per_gpu * sum(workload.HOTNESS)
    backward = stages["dense backward"] / 2
    met = report.topology.collective_seconds if setting.num_gpus > 1 else 0.0
    num_means = dense.num_buckets + (ranks[0].all_reduce_seconds > 0)
    mean_met = num_means * ALL_REDUCE_EXCHANGES * met
    num_parts = min(dense.num_buckets, MOST_PARTS)

    def exchange(name: str, seconds: float, *after: str) -> Task:
        return Task(name, Engine.WIRES, seconds, after, min(met, seconds))

    tasks = [
        Task("lookup", Engine.MULTIPROCESSORS, stages["lookup"]),
        # Those of the next batch, which nothing in the step waits for.
        exchange("ids out", max(rank.ids_seconds for rank in ranks)),
        Task(
            "find runs",
            Engine.MULTIPROCESSORS,
            SORT_SECONDS + num_ids * SORT_SECONDS_PER_ID,
            ("ids out",),
        ),
        exchange("vectors back", max(rank.vectors_seconds for rank in ranks), "lookup"),
        Task("forward", Engine.MULTIPROCESSORS, stages["dense forward"], ("vectors back",)),
        Task("backward of inputs", Engine.MULTIPROCESSORS, backward, ("forward",)),
        exchange(
            "gradients out", max(rank.gradients_seconds for rank in ranks), "backward of inputs"
        ),
        Task("row update", Engine.MULTIPROCESSORS, stages["row update"], ("gradients out",)),
    ]
    # Gradients of weights are computed last, since nothing but their means waits for them.
    earlier = "backward of inputs"
    for number in range(num_parts):
        weights, mean = f"backward of weights {number}", f"mean {number}"
        tasks += [
            Task(weights, Engine.MULTIPROCESSORS, backward / num_parts, (earlier,)),
            Task(
                mean,
                Engine.WIRES,
                stages["mean"] / num_parts,
                (weights,),
                mean_met / num_parts,
            ),
            Task(
                f"dense update {number}",
                Engine.MULTIPROCESSORS,
                stages["dense update"] / num_parts,
                (mean,),
            ),
        ]
        earlier = weights
    return tasks
