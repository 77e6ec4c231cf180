"""DLRM-DCNv2, or its tables alone, as torchembed trains it, wherever the tables are."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bench.data import dlrm_dcnv2 as workload
from bench.step.model_optimizers import half_precision, make_optimizers
from bench.tiers.setting import TierSetting
from bench.tiers.storages import Storages
from torchembed import CacheStatistics, EmbeddingBagCollection, SparseFeatures
from torchembed.data import Batch
from torchembed.ops.binary_cross_entropy import binary_cross_entropy
from torchembed.tables.tiers import DiskGroup
from torchembed.training import TrainPipeline

_ROWS_AT_ONCE = 1 << 16
_SCALE = 16.0
"""Factor of the logits of tables alone, so that what rows become shows in the losses."""


def logits_of(pooled: Tensor) -> Tensor:
    """``[B]`` of all columns of pooled vectors ``[B, F * D]``."""
    return pooled.mean(1) * _SCALE


class _Logits(nn.Module):
    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = tables

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return logits_of(self.embedding_bag_collection(sparse).values())


class TorchembedTraining:
    """A pipeline over batches in pinned memory.

    Args:
        setting: what is trained.
        storages: of the tables. On disk all rows are written before the first step, as if each had
            been trained once.
    """

    def __init__(self, setting: TierSetting, storages: Storages) -> None:
        device = setting.device
        configs = [
            dataclasses.replace(config, storage=storages[config.name])
            for config in workload.table_configs(setting.max_rows)
        ]
        half = half_precision(setting)
        if setting.model == "dlrm":
            model: nn.Module = workload.make_model(
                configs,
                workload.DENSE_SIZES,
                table_device=device,
                device=device,
                seed=setting.seed,
                output_dtype=half or torch.float32,
            )
        else:
            model = _Logits(EmbeddingBagCollection(configs, device=device, seed=setting.seed))
        optimizers = make_optimizers(model, setting)
        tables = model.embedding_bag_collection
        assert isinstance(tables, EmbeddingBagCollection)
        self.tables = tables
        for group in tables.table_set.groups:
            if isinstance(group, DiskGroup):
                _write_all_rows(group)
        self._pipeline = TrainPipeline(
            model, binary_cross_entropy, list(optimizers), device=device, autocast=half
        )

    @staticmethod
    def batch(batch: Batch) -> Batch:
        """The batch as it is."""
        return batch

    def step(self, batches: Iterator[Batch]) -> Tensor:
        """The loss of one step, on the device."""
        return self._pipeline.progress(batches).loss

    def counts(self) -> dict[str, int]:
        """The counts of all caches together by now, by the names of :class:`CacheStatistics`;
        empty without any. Waits for the device."""
        caches = self.tables.cache_statistics(wait=True).values()
        names = [field.name for field in dataclasses.fields(CacheStatistics)] if caches else []
        return {name: sum(getattr(cache, name) for cache in caches) for name in names}

    def close(self) -> None:
        """Destroy the graphs, and end threads."""
        self._pipeline.close()


def _write_all_rows(group: DiskGroup) -> None:
    for rows in torch.arange(group.num_rows).split(_ROWS_AT_ONCE):
        lines = group.lines.store.layout.packed(group.read_lines(rows))
        group.lines.store.write(rows, lines)
