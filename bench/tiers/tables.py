"""DLRM-DCNv2's tables as the benchmark trains them: on the device, in host memory or on disk."""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import torchembed
from bench.data import dlrm_dcnv2 as workload
from torchembed import CacheStatistics, Disk, EmbeddingBagCollection, HostMemory
from torchembed.core.features import SparseFeatures
from torchembed.data import Batch
from torchembed.ops.binary_cross_entropy import binary_cross_entropy
from torchembed.tables import Storage
from torchembed.tables.tiers import DiskGroup
from torchembed.training import TrainPipeline

LR, EPS, SEED = 0.005, 1e-8, 0
_ROWS_AT_ONCE = 1 << 16
SCALE = 16.0
"""Of the logits, so that what rows become shows in the losses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierSetting:
    """The training that all systems of a comparison do."""

    batch_size: int
    ids: str
    """``uniform`` or ``zipf``."""
    max_rows: int | None
    device: torch.device


def cache_rows(table_rows: Sequence[int], part: float) -> int:
    """The fewest rows for each table, of smaller ones all of theirs, that make ``part`` of all."""
    wanted = part * sum(table_rows)
    return bisect.bisect_left(
        range(max(table_rows)), wanted, key=lambda most: sum(min(most, n) for n in table_rows)
    )


def logits_of(pooled: Tensor) -> Tensor:
    """``[B]`` of all columns of pooled vectors ``[B, F * D]``."""
    return pooled.mean(1) * SCALE


def storage_of(
    setting: TierSetting, part: float, disk: Path | None = None, host_times: float = 1.0
) -> HostMemory | Disk:
    """Host memory, or a disk below ``host_times`` as many rows there as are cached, behind a cache
    for ``part`` of all rows."""
    configs = workload.table_configs(setting.max_rows)
    cached = cache_rows([config.num_embeddings for config in configs], part)
    if disk is None:
        return HostMemory(cache_rows=cached)
    return Disk(path=disk, host_rows=round(host_times * cached), cache_rows=cached)


class _Logits(nn.Module):
    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return logits_of(self.tables(sparse).values())


class TorchembedTables:
    """A pipeline over a collection of the tables, under row-wise Adagrad.

    Args:
        setting: what is trained.
        storage: of all tables; None for the device. On disk all rows are written before the first
            step, as if each had been trained once.
    """

    def __init__(self, setting: TierSetting, storage: Storage | None) -> None:
        configs = [
            dataclasses.replace(config, storage=storage)
            for config in workload.table_configs(setting.max_rows)
        ]
        self.tables = EmbeddingBagCollection(configs, device=setting.device, seed=SEED)
        optimizer = torchembed.optim.RowwiseAdagrad(self.tables.parameters(), lr=LR, eps=EPS)
        for group in self.tables.table_set.groups:
            if not isinstance(group, DiskGroup):
                continue
            for rows in torch.arange(group.num_rows).split(_ROWS_AT_ONCE):
                lines = group.lines.store.layout.packed(group.read_lines(rows))
                group.lines.store.write(rows, lines)
        self._pipeline = TrainPipeline(
            _Logits(self.tables), binary_cross_entropy, [optimizer], device=setting.device
        )

    @staticmethod
    def batch(batch: Batch, device: torch.device) -> Batch:
        """The batch, in pinned memory for a GPU."""
        return batch.pin_memory() if device.type == "cuda" else batch

    def step(self, batches: Iterator[Batch]) -> Tensor:
        """The loss of one step, on the device."""
        return self._pipeline.progress(batches).loss

    def counts(self) -> CacheStatistics | None:
        """What the cache has counted by now; None without one. Waits for the device."""
        return next(iter(self.tables.cache_statistics(wait=True).values()), None)

    def close(self) -> None:
        """Destroy the graphs, and end threads."""
        self._pipeline.close()
