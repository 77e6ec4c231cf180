"""FBGEMM's tables of the same rows: in managed memory, with or without its cache on the device."""

import collections
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.data import dlrm_dcnv2 as workload
from bench.tiers.tables import EPS, LR, TierSetting, logits_of
from torchembed.data import Batch
from torchembed.ops.binary_cross_entropy import binary_cross_entropy


class _BatchOfIds(NamedTuple):
    values: Tensor
    offsets: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "_BatchOfIds":
        return _BatchOfIds(*(tensor.to(device, non_blocking=True) for tensor in self))


class FbgemmTables:
    """FBGEMM's table-batched embedding, whose backward updates the rows.

    Its cache gets the rows of the next batch on a stream of its own while a batch is in backward,
    as in TorchRec's pipeline with a prefetch.

    Args:
        setting: what is trained.
        location: name of an ``EmbeddingLocation``: ``MANAGED_CACHING``, ``MANAGED`` or, on a CPU,
            ``HOST``.
        part: of the rows, that the cache of ``MANAGED_CACHING`` holds.
        weights: the initial rows ``[R, D]`` of each table.
    """

    def __init__(
        self, setting: TierSetting, location: str, part: float, weights: list[Tensor]
    ) -> None:
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
        self._tables: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(len(rows), workload.DIM, EmbeddingLocation[location], compute) for rows in weights],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LR,
            eps=EPS,
            stochastic_rounding=False,
            cache_algorithm=CacheAlgorithm.LRU,
            cache_load_factor=part,
            prefetch_pipeline=self._prefetches,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=setting.device,
        )
        with torch.no_grad():
            for theirs, rows in zip(self._tables.split_embedding_weights(), weights, strict=True):
                theirs.copy_(rows)
        self._stream = torch.cuda.Stream() if self._prefetches else None
        self._ready: collections.deque[_BatchOfIds] = collections.deque()

    @staticmethod
    def batch(batch: Batch, device: torch.device) -> _BatchOfIds:
        """The batch, in pinned memory for a GPU."""
        _, sparse, labels = batch
        assert sparse.hotness is not None
        lengths = torch.tensor(sparse.hotness).repeat_interleave(sparse.batch_size)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        made = _BatchOfIds(sparse.values, offsets, labels)
        if device.type == "cuda":
            made = _BatchOfIds(*(tensor.pin_memory() for tensor in made))
        return made

    def step(self, batches: Iterator[_BatchOfIds]) -> Tensor:
        """The loss of one step, on the device."""
        if not self._ready:
            self._prefetch(next(batches))
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        values, offsets, labels = self._ready.popleft()
        loss = binary_cross_entropy(logits_of(self._tables(values, offsets)), labels)
        self._prefetch(next(batches))
        loss.backward()
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

    def counts(self) -> None:
        """Its own counters slow it down, so they are off."""
        return None

    def close(self) -> None:
        """Nothing is to be destroyed."""
