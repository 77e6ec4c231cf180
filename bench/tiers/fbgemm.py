"""FBGEMM's tables of the same rows: in managed memory, with or without its cache on the device,
below torch's dense part."""

import collections
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.data import dlrm_dcnv2 as workload
from bench.step.model_optimizers import half_precision
from bench.step.reference_step import dense_part, dense_values
from bench.tiers.setting import TierSetting
from bench.tiers.training import logits_of
from torchembed.data import Batch
from torchembed.ops.binary_cross_entropy import binary_cross_entropy

_ROWS_AT_ONCE = 1 << 18
OPTIMIZERS = {"adagrad": "EXACT_ADAGRAD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}
"""Names of an ``EmbOptimType``."""


class _BatchOfIds(NamedTuple):
    dense: Tensor
    values: Tensor
    offsets: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "_BatchOfIds":
        return _BatchOfIds(*(tensor.to(device, non_blocking=True) for tensor in self))


class _NoDensePart(nn.Module):
    """The loss of tables alone."""

    def forward(self, dense: Tensor, pooled: Tensor, labels: Tensor) -> Tensor:
        return binary_cross_entropy(logits_of(pooled), labels)


class FbgemmTraining:
    """FBGEMM's table-batched embedding, whose backward updates the rows, in float32; and the dense
    part by torch's own modules and optimizer, eagerly, in the setting's precision.

    Its cache gets the rows of the next batch on a stream of its own while a batch is in the dense
    part and in backward, as in TorchRec's pipeline with a prefetch.

    Args:
        setting: what is trained.
        location: name of an ``EmbeddingLocation``: ``MANAGED_CACHING``, ``MANAGED`` or, on a CPU,
            ``HOST``.
        part: of the rows, that the cache of ``MANAGED_CACHING`` holds.
    """

    def __init__(self, setting: TierSetting, location: str, part: float) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            BoundsCheckMode,
            CacheAlgorithm,
            EmbeddingLocation,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        on_gpu = setting.device.type == "cuda"
        self._device, self._prefetches = setting.device, location == "MANAGED_CACHING"
        compute = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
        where = EmbeddingLocation[location]
        sizes = workload.table_sizes(setting.max_rows)
        self._tables: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(num_rows, workload.DIM, where, compute) for num_rows in sizes],
            optimizer=EmbOptimType[OPTIMIZERS[setting.optimizer]],
            learning_rate=setting.lr,
            eps=setting.eps,
            stochastic_rounding=False,
            cache_algorithm=CacheAlgorithm.LRU,
            cache_load_factor=part,
            prefetch_pipeline=self._prefetches,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=setting.device,
        )
        self._fill(setting)
        self._dense: nn.Module = _NoDensePart()
        self._optimizer: torch.optim.Optimizer | None = None
        if setting.model == "dlrm":
            self._dense = dense_part(dense_values(setting), setting.precision)
            self._optimizer = setting.dense_optimizer(self._dense.parameters())
        half = half_precision(setting)
        self._autocast = torch.autocast(setting.device.type, half, enabled=half is not None)
        lengths = torch.tensor(workload.HOTNESS).repeat_interleave(setting.batch_size)
        self._offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        if on_gpu:
            self._offsets = self._offsets.pin_memory()
        self._stream = torch.cuda.Stream() if self._prefetches else None
        self._ready: collections.deque[_BatchOfIds] = collections.deque()

    @torch.no_grad()
    def _fill(self, setting: TierSetting) -> None:
        """Give rows the values that torchembed's have, some at a time."""
        configs = workload.table_configs(setting.max_rows)
        weights = self._tables.split_embedding_weights()
        for config, weight in zip(configs, weights, strict=True):
            spec = config.spec(setting.seed)
            for first in range(0, spec.num_rows, _ROWS_AT_ONCE):
                row_ids = range(first, min(first + _ROWS_AT_ONCE, spec.num_rows))
                made = torch.empty(len(row_ids), spec.dim, device=setting.device)
                spec.initializer.fill(made, spec.key, row_ids, 0, spec.num_rows)
                weight[first : first + len(row_ids)].copy_(made)

    def batch(self, batch: Batch) -> _BatchOfIds:
        """The batch with the offsets of its bags."""
        assert batch.dense is not None
        return _BatchOfIds(batch.dense, batch.sparse.values, self._offsets, batch.labels)

    def step(self, batches: Iterator[_BatchOfIds]) -> Tensor:
        """The loss of one step, on the device."""
        if not self._ready:
            self._prefetch(next(batches))
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        dense, values, offsets, labels = self._ready.popleft()
        pooled = self._tables(values, offsets)
        with self._autocast:
            loss = self._dense(dense, pooled, labels)
        self._prefetch(next(batches))
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        return loss.detach()

    def _prefetch(self, batch: _BatchOfIds) -> None:
        """Copy a batch to the device and, with a cache, bring its rows there."""
        if self._stream is None:
            self._ready.append(batch.to(self._device))
            return
        forward_stream = torch.cuda.current_stream()
        self._stream.wait_stream(forward_stream)
        with torch.cuda.stream(self._stream):
            on_device = batch.to(self._device)
            self._tables.prefetch(
                on_device.values, on_device.offsets, forward_stream=forward_stream
            )
        for tensor in on_device:
            tensor.record_stream(forward_stream)
        self._ready.append(on_device)

    def counts(self) -> dict[str, int]:
        """Nothing: its own counters slow it down, so they are off."""
        return {}

    def close(self) -> None:
        """Nothing is to be destroyed."""
