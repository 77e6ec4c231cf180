"""Simulates the step of MLPerf's DLRM-DCNv2 on 1 to 1,024 GPUs, without any.

``python -m bench.simulate`` plans the tables for each number of GPUs, computes the time of each
stage by the planner's costs, and runs the stages on a GPU's multiprocessors and wires
(:mod:`bench.simulate.schedule`). It prints milliseconds, samples a second, the share of one GPU's
speed that each keeps, the memory that the fullest GPU needs, what limits the step
(:mod:`bench.simulate.limits`), and the stages that are longest; ``--picture`` draws the timelines.
``--row-factor``, ``--batch-per-gpu`` and the two bandwidths change the size of tables and batches
and the rates of links. ``--fit`` compares the simulation with the steps that were measured, in
``bench/results``.

Costs between nodes are not measured: bytes over nine tenths of one 400 Gb/s adapter a GPU, and for
each exchange, within nodes and between them, the overhead of each rank that takes part, fitted to 2
and 8 GPUs of one node.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from bench.planning.costs import RESULTS, stored_rows
from bench.simulate.limits import savings
from bench.simulate.measured import comparisons, fitted
from bench.simulate.picture import Simulated, draw
from bench.simulate.schedule import FITTED, run, stage_of
from bench.simulate.step import Setting, simulated_step
from torchembed.sharding.planning.topology import GPUS, Hardware

HARDWARE = {hardware.name: hardware for hardware in GPUS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the simulation."""

    hardware: Literal["H100", "H200"] = "H200"
    gpus: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    gpus_per_node: int = 8
    batch_per_gpu: int = 8192
    ids: Literal["uniform", "zipf"] = "zipf"
    max_rows: int | None = None
    """Tables are cut to this; MLPerf's have 204 M rows in all."""
    row_factor: int = 1
    """Rows of each table, as a multiple of MLPerf's."""
    intra_node_bandwidth: float | None = None
    """Bytes a second that a GPU sends to its node while it receives as many (NVLink); None for the
    hardware's."""
    inter_node_bandwidth: float | None = None
    """Bytes a second to other nodes, likewise (InfiniBand)."""
    optimizer: Literal["adagrad", "rowwise_adagrad", "sgd"] = "adagrad"
    wire: Literal["fp32", "bf16", "fp8"] = "bf16"
    """Precision of vectors and their gradients between GPUs."""
    fit: bool = False
    """Compare with what was measured, and print the fitted numbers."""
    results: Path = RESULTS
    """Folder of measured rows."""
    picture: Path | None = None
    """PNG to draw."""

    def __post_init__(self) -> None:
        for name in ("row_factor", "batch_per_gpu", "intra_node_bandwidth", "inter_node_bandwidth"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")

    @property
    def gpu(self) -> Hardware:
        """The hardware, with the links that are asked for."""
        links = {
            "intra_node_bandwidth": self.intra_node_bandwidth,
            "inter_node_bandwidth": self.inter_node_bandwidth,
        }
        given = {name: rate for name, rate in links.items() if rate is not None}
        return dataclasses.replace(HARDWARE[self.hardware], **given)


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, description=__doc__, args=arguments)
    if config.fit:
        print_fit(config.results)
    else:
        print_steps(config)


def print_fit(results: Path) -> None:
    """Print each measured step beside the simulated one, and the numbers that fit best."""
    measured = comparisons(stored_rows(results))
    print(
        f"{'GPUs':12} {'batch':>6} {'ids':8} {'rows':>9} {'measured':>9} {'simulated':>10}  ratio"
    )
    for each in measured:
        setting, ratio = each.setting, each.ratio(FITTED)
        print(
            f"{setting.num_gpus:4} {setting.hardware.name:7} {setting.batch_per_gpu:6} "
            f"{setting.ids:8} {setting.max_rows or 'all':>9} {each.milliseconds:9.3f} "
            f"{ratio * each.milliseconds:10.3f}  {ratio:5.2f}"
        )
    print(f"simulated with {FITTED}; the best fit is {fitted(measured)}")


def print_steps(config: Config) -> None:
    """Print the step of each number of GPUs, and draw them where a picture is asked for."""
    print(
        f"{'GPUs':>5} {'ms':>8} {'M samples/s':>12} {'of one GPU':>11} {'GiB':>6}  "
        f"{'limit':15} longest stages, ms alone"
    )
    steps, of_one = [], 0.0
    for num_gpus in config.gpus:
        setting = Setting(
            hardware=config.gpu,
            num_gpus=num_gpus,
            gpus_per_node=config.gpus_per_node,
            batch_per_gpu=config.batch_per_gpu,
            ids=config.ids,
            max_rows=config.max_rows,
            row_factor=config.row_factor,
            optimizer=config.optimizer,
            wire=config.wire,
        )
        try:
            tasks, report = simulated_step(setting)
        except ValueError as error:
            print(f"{num_gpus:5} {str(error).partition(',')[0]}")
            continue
        step = Simulated(num_gpus, run(tasks, FITTED))
        steps.append(step)
        samples = num_gpus * config.batch_per_gpu / step.milliseconds * 1e3
        of_one = of_one or samples / num_gpus
        stages: dict[str, float] = {}
        for task in tasks:
            name = stage_of(task.name)
            stages[name] = stages.get(name, 0.0) + 1e3 * task.seconds
        longest = sorted(stages, key=lambda name: -stages[name])[:3]
        saved = savings(tasks, FITTED)
        limit = max(saved, key=lambda each: saved[each])
        held = max(rank.held_bytes for rank in report.ranks) / 2**30
        print(
            f"{num_gpus:5} {step.milliseconds:8.2f} {samples / 1e6:12.1f} "
            f"{samples / num_gpus / of_one:11.0%} {held:6.1f}  "
            f"{f'{limit.value} {saved[limit]:.0%}':15} "
            + ", ".join(f"{name} {stages[name]:.2f}" for name in longest)
        )
    if config.picture is not None and steps:
        title = f"DLRM-DCNv2, {config.batch_per_gpu} samples a GPU, {config.hardware}, simulated"
        draw(steps, config.picture, title=title)
        print(f"picture: {config.picture}")


if __name__ == "__main__":
    main()
