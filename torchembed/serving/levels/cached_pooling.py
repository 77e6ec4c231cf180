"""Lookups and pooling of features by a cache alone, for CUDA graphs."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.serving.levels.embedding_cache import EmbeddingCache
from torchembed.serving.levels.feature_plan import FeaturePlan
from torchembed.serving.levels.feature_pooling import pool_cached
from torchembed.serving.levels.served_table import ServedFeature


class CachedFeatures(NamedTuple):
    """Answer of :meth:`CachedPooling.run`."""

    vectors: dict[str, Tensor]
    """For each feature, as in :class:`PooledFeatures`; default rows count where ids are missing.
    """
    num_missing: Tensor
    """int64 ``[1]``: how many ids of the samples are not cached."""


class CachedPooling:
    """Looks up and pools features of fixed hotness as :meth:`LeveledLookup.pooled`, in a cache
    without any level below: operations of static shapes that wait for nothing.

    Args:
        cache: on one device.
        hotness: ids of a sample, by feature, in the order of the ids.
        batch_size: the most samples.
        served: each feature with its table and pooling.
        dtype: of the vectors.

    Raises:
        ValueError: for features that are lacking, or tables that are not served.
    """

    def __init__(
        self,
        cache: EmbeddingCache,
        hotness: dict[str, int],
        batch_size: int,
        served: Sequence[ServedFeature],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._cache, self._hotness, self._batch_size = cache, hotness, batch_size
        self._dtype = dtype
        self._plan = FeaturePlan(cache, tuple(hotness), served)
        self.num_ids = batch_size * sum(hotness.values())
        """Ids of the most samples."""
        ids = torch.zeros(self.num_ids, dtype=torch.int64, device=cache.device)
        self._tables = self._plan.tables_of(self._features(ids))
        samples = [torch.arange(batch_size).repeat_interleave(count) for count in hotness.values()]
        self._samples = torch.cat(samples).to(cache.device)

    def run(self, ids: Tensor, num_samples: Tensor) -> CachedFeatures:
        """Look up and pool. The caller is inside ``cache.access``.

        Args:
            ids: int64 ``[num_ids]`` on the cache's device: of each feature those of
                ``batch_size`` samples.
            num_samples: int64 ``[1]`` likewise: samples from this one on have no ids.
        """
        features = self._features(ids)
        tables = torch.where(self._samples < num_samples, self._tables, -1)
        found = self._cache.find(ids, tables, reads=self._plan.reads(features))
        vectors = pool_cached(features, self._plan, self._cache, found, self._dtype)
        return CachedFeatures(vectors, found.num_missing)

    def _features(self, ids: Tensor) -> SparseFeatures:
        return SparseFeatures(
            keys=tuple(self._hotness),
            values=ids,
            batch_size=self._batch_size,
            hotness=tuple(self._hotness.values()),
        )
