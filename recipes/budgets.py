"""Placing the tables of a run within memory of given sizes."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from recipes.ranks import num_nodes
from torchembed import EmbeddingBagCollection, EmbeddingBagConfig, plan_embeddings
from torchembed.core import ranks
from torchembed.data import BatchSource
from torchembed.modules import table_uses
from torchembed.optim import FusedOptimizer
from torchembed.sharding import CPU, H200, Host, NodeDisk, Placement, Planner, Topology
from torchembed.sharding.planning.memory_budget import check_hosts, memory_budget
from torchembed.sharding.planning.topology import available_host_bytes, free_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budgets:
    """Memory that tables, their optimizer state and their buffers may take."""

    device_bytes: int
    """Memory of each rank's device."""
    host_bytes: int
    """Memory of each host, beside that of its devices, for all its ranks together."""
    disk: Path | None = None
    """Folder for rows that neither has room for; without it there is none for them."""

    @classmethod
    def of(
        cls, device_bytes: int | None, host_bytes: int | None, disk: Path | None
    ) -> "Budgets | None":
        """The budgets of a run; None for one without.

        Raises:
            ValueError: where a part is given and others that it needs are not.
        """
        given = {"device_bytes": device_bytes, "host_bytes": host_bytes}
        if disk is None and device_bytes is None and host_bytes is None:
            return None
        if device_bytes is None or host_bytes is None:
            missing = " and ".join(name for name, value in given.items() if value is None)
            raise ValueError(
                f"{missing} must be given where another one of device_bytes, host_bytes and disk "
                "is; say how much memory tables may take"
            )
        if device_bytes < 1:
            raise ValueError(f"device_bytes must be positive, got {device_bytes}")
        if host_bytes < 0:
            raise ValueError(f"host_bytes must not be negative, got {host_bytes}")
        return cls(device_bytes=device_bytes, host_bytes=host_bytes, disk=disk)

    def planner(
        self,
        source: BatchSource,
        device: torch.device,
        optimizer: type[FusedOptimizer],
        placement: Placement | None = None,
    ) -> Planner:
        """A planner within the budgets, for batches like the first one of ``source``, the first
        rank's; collective.

        Args:
            placement: of every table; the plan chooses where None.
        """
        hardware, nodes = H200 if device.type == "cuda" else CPU, num_nodes()
        topology = Topology.of_hardware(
            hardware,
            ranks_per_node=ranks.world_size() // nodes,
            num_nodes=nodes,
            host=Host(memory_bytes=self.host_bytes),
            disk=NodeDisk(path=self.disk),
        )
        # Both budgets are of their own on a CPU, too.
        topology = dataclasses.replace(
            topology, memory_bytes=self.device_bytes, devices_are_hosts=False
        )
        lookups, distinct = _first_lookups(source)
        return Planner(
            batch_size=source.batch_size,
            hotness=lookups,
            distinct_ids=distinct,
            optimizer=optimizer,
            placements=tuple(Placement) if placement is None else (placement,),
            topology=topology,
        )


def placed(
    configs: Sequence[EmbeddingBagConfig], planner: Planner, device: torch.device
) -> list[EmbeddingBagConfig]:
    """``configs`` with the storages that ``planner`` chooses for a process alone, which are
    printed; as they are where ranks share the tables.

    Raises:
        ValueError: where the machine has less memory than the plan takes, as ``shard_embeddings``
            says it to ranks.
    """
    if dist.is_initialized():
        return list(configs)
    model = nn.ModuleDict({"tables": EmbeddingBagCollection(configs, device="meta")})
    report = plan_embeddings(model, planner)
    print(report, flush=True)
    needed = memory_budget(
        report.plan,
        table_uses(model),
        0,
        report=report,
        dense_bytes=0,
        free_bytes=free_bytes(device),
        host_free_bytes=available_host_bytes(),
        is_on_host=device.type == "cpu",
    )
    needed.check()
    check_hosts([needed])
    return [
        dataclasses.replace(config, storage=table.storage)
        for config, table in zip(configs, report.plan.tables, strict=True)
    ]


def _first_lookups(source: BatchSource) -> tuple[dict[str, float], dict[str, float]]:
    """Lookups a sample of each feature, and its different ids, in the first rank's first batch."""
    sparse = next(iter(source)).sparse
    of_features = sparse.values.split(sparse.lengths().sum(1).tolist())
    ids = dict(zip(sparse.keys, of_features, strict=True))
    lookups = {key: len(values) / sparse.batch_size for key, values in ids.items()}
    distinct = {key: float(len(values.unique())) for key, values in ids.items() if len(values)}
    return ranks.from_first_rank((lookups, distinct))
