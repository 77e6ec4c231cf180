"""DLRM-DCNv2's tables as the benchmark trains them: all on the device, or in host memory."""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

import torchembed
from bench.data import dlrm_dcnv2 as workload
from torchembed import CacheStatistics, EmbeddingBagCollection, HostMemory
from torchembed.core.features import SparseFeatures
from torchembed.data import Batch
from torchembed.ops.binary_cross_entropy import binary_cross_entropy
from torchembed.training import TrainPipeline

LR, EPS, SEED = 0.005, 1e-8, 0
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
        part: of the rows, that the cache on the device holds; None for tables on the device.
    """

    def __init__(self, setting: TierSetting, part: float | None) -> None:
        configs = workload.table_configs(setting.max_rows)
        if part is not None:
            storage = HostMemory(
                cache_rows=cache_rows([config.num_embeddings for config in configs], part)
            )
            configs = [dataclasses.replace(config, storage=storage) for config in configs]
        self.tables = EmbeddingBagCollection(configs, device=setting.device, seed=SEED)
        optimizer = torchembed.optim.RowwiseAdagrad(self.tables.parameters(), lr=LR, eps=EPS)
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
        """Destroy the graphs."""
        self._pipeline.close()
