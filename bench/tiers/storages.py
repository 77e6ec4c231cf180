"""Storages of a measured system's tables: a part of their rows cached, or as a planner says."""

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bench.data import dlrm_dcnv2 as workload
from bench.planning.step_costs import make_planner
from bench.tiers.setting import TierSetting
from torchembed import Disk, HostMemory, plan_embeddings
from torchembed.sharding import H200, PlanReport, Topology
from torchembed.sharding.planning.topology import GPUS, Host
from torchembed.tables import Storage

Storages = Mapping[str, Storage | None]
"""The storage of each table, by its name; None for the device."""


def on_device(setting: TierSetting) -> Storages:
    """All tables on the device."""
    return {config.name: None for config in workload.table_configs(setting.max_rows)}


def cached_part(
    setting: TierSetting, part: float, disk: Path | None = None, host_times: float = 1.0
) -> Storages:
    """All tables in host memory, or on a disk below ``host_times`` as many rows there as are
    cached, behind one cache for ``part`` of all rows."""
    configs = workload.table_configs(setting.max_rows)
    cached = cache_rows([config.num_embeddings for config in configs], part)
    storage: Storage = HostMemory(cache_rows=cached)
    if disk is not None:
        storage = Disk(path=disk, host_rows=round(host_times * cached), cache_rows=cached)
    return {config.name: storage for config in configs}


def cache_rows(table_rows: Sequence[int], part: float) -> int:
    """The fewest rows for each table, of smaller ones all of theirs, that make ``part`` of all."""
    wanted = part * sum(table_rows)
    return bisect.bisect_left(
        range(max(table_rows)), wanted, key=lambda most: sum(min(most, n) for n in table_rows)
    )


def plan_of(setting: TierSetting, device_bytes: float, host_bytes: float) -> PlanReport:
    """The planner's plan for one GPU, which ``print`` shows.

    Args:
        setting: what is trained.
        device_bytes: what rows, their states, caches and buffers may take on the device.
        host_bytes: what rows and their states may take of host memory.

    Raises:
        ValueError: where the tables do not fit.
    """
    meta, on_gpu = torch.device("meta"), setting.device.type == "cuda"
    name = torch.cuda.get_device_name(setting.device) if on_gpu else ""
    hardware = next((known for known in GPUS if known.name in name), H200)
    topology = Topology.of_hardware(
        hardware, ranks_per_node=1, host=Host(memory_bytes=int(host_bytes))
    )
    model = workload.make_model(
        workload.table_configs(setting.max_rows),
        workload.DENSE_SIZES,
        table_device=meta,
        device=meta,
        seed=setting.seed,
        output_dtype=torch.bfloat16 if setting.precision == "bf16" else torch.float32,
    )
    planner = make_planner(
        setting.batch_size, setting.ids, setting.optimizer, setting.precision, setting.max_rows
    )
    topology = dataclasses.replace(topology, memory_bytes=int(device_bytes))
    return plan_embeddings(model, dataclasses.replace(planner, topology=topology))


def planned(report: PlanReport) -> Storages:
    """The storages of a plan."""
    return {table.table.rpartition(".")[2]: table.storage for table in report.plan.tables}
