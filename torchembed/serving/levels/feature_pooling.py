"""Pooling the features of a batch, from the cache or from rows that were read."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.types import Pooling
from torchembed.ops.pooled_lookup import pooled_lookup
from torchembed.serving.levels.cache_group import Bags
from torchembed.serving.levels.embedding_cache import EmbeddingCache, FoundRows
from torchembed.serving.levels.feature_plan import FeaturePlan


def pool_cached(
    features: SparseFeatures,
    plan: FeaturePlan,
    cache: EmbeddingCache,
    found: FoundRows,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """The vectors of each feature, in ``dtype``, straight from the cache, default rows for ids that
    it lacks. Waits for nothing, but for a GPU where jagged features are not pooled."""
    vectors: dict[str, Tensor] = {}
    for planned in plan.poolings:
        if planned.pooling is None:
            rows = cache.read(found, planned.group).to(dtype)
            vectors |= _sequences(features, planned.features, rows)
        else:
            bags = _bags(features, planned.pooling)
            pooled = cache.pool(found, planned.group, bags).to(dtype)
            vectors |= {features.keys[place]: pooled[:, place] for place in planned.features}
    return vectors


def pool_rows(
    features: SparseFeatures, plan: FeaturePlan, rows: dict[int, Tensor]
) -> dict[str, Tensor]:
    """The vectors of each feature, of the rows of each group: float32 ``[L, dim]``, a row for each
    id."""
    vectors: dict[str, Tensor] = {}
    for planned in plan.poolings:
        of_group = rows[planned.group]
        if planned.pooling is None:
            vectors |= _sequences(features, planned.features, of_group)
            continue
        places = torch.arange(len(of_group), device=of_group.device)
        bags = _bags(features, planned.pooling)
        pooled = pooled_lookup(of_group, places, **bags._asdict())
        vectors |= {features.keys[place]: pooled[:, place] for place in planned.features}
    return vectors


def _bags(features: SparseFeatures, pooling: Pooling) -> Bags:
    weights = features.weights
    return Bags(
        offsets=features.offsets,
        hotness=features.hotness,
        batch_size=features.batch_size,
        num_features=len(features.keys),
        per_id_weights=None if weights is None else weights.float(),
        pooling=pooling,
    )


def _sequences(features: SparseFeatures, places: Sequence[int], rows: Tensor) -> dict[str, Tensor]:
    """The parts of ``rows [L, D]`` that belong to the features at ``places``."""
    if features.hotness is not None:
        bounds = [0]
        for count in features.hotness:
            bounds.append(bounds[-1] + count * features.batch_size)
    else:
        assert features.offsets is not None
        firsts = torch.arange(len(features.keys) + 1) * features.batch_size
        bounds = features.offsets.cpu()[firsts].tolist()
    return {features.keys[place]: rows[bounds[place] : bounds[place + 1]] for place in places}
