"""Which feature looks up which table, as tensors on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures, with_offsets
from torchembed.core.stand_ins import KeptTensors
from torchembed.core.types import Pooling
from torchembed.ops.linearize_ids.reference import id_features
from torchembed.serving.levels.embedding_cache import EmbeddingCache
from torchembed.serving.levels.served_table import ServedFeature, positions_of

_NUM_FORMS = 16
"""The most forms of fixed hotness whose tables of positions are kept."""


class PlannedPooling(NamedTuple):
    """Features that are pooled by one call: of tables of one group, and of one pooling."""

    group: int
    pooling: Pooling | None
    """None for features whose vectors are not pooled."""
    features: tuple[int, ...]
    """Their places among the batch's features."""


class FeaturePlan:
    """The lookups of a batch's features.

    Args:
        cache: that is looked up.
        keys: the features of batches, in their order.
        served: those that are looked up.

    Raises:
        ValueError: for features that batches lack, come twice, or have no served table.
    """

    def __init__(
        self, cache: EmbeddingCache, keys: Sequence[str], served: Sequence[ServedFeature]
    ) -> None:
        names = [feature.name for feature in served]
        lacking = sorted(set(names).difference(keys))
        if lacking:
            raise ValueError(f"features must have the keys {lacking}, got {list(keys)}")
        if len(set(names)) != len(names):
            raise ValueError(f"served features must have different names, got {names}")
        self._is_matrix = cache.is_matrix
        tables = positions_of([feature.table for feature in served], cache.tables)
        places = [list(keys).index(name) for name in names]
        of_features = [-1] * (len(keys) + 1)
        members: dict[tuple[int, Pooling | None], list[int]] = {}
        for place, table, feature in zip(places, tables, served, strict=True):
            of_features[place] = table
            members.setdefault((cache.group_of[table], feature.pooling), []).append(place)
        self.poolings = [
            PlannedPooling(group, pooling, tuple(sorted(places)))
            for (group, pooling), places in members.items()
        ]
        self._numbers = torch.tensor(of_features, dtype=torch.int32, device=cache.device)
        self._of_forms: KeptTensors[object, Tensor] = KeptTensors(_NUM_FORMS)

    def reads(self, features: SparseFeatures) -> bool:
        """True where a lookup of ``features`` is to read each id's row: where some vectors are rows
        as they are, and where the cache cannot be pooled straight."""
        one_id = features.hotness is not None and set(features.hotness) == {1}
        is_as_it_is = one_id and features.weights is None
        return (
            is_as_it_is
            or not self._is_matrix
            or any(planned.pooling is None for planned in self.poolings)
        )

    def tables_of(self, features: SparseFeatures) -> Tensor:
        """The table of each id, int32 ``[L]``: its place in the cache, -1 for ids of features that
        are not looked up, and behind the last bag."""
        values, hotness = features.values, features.hotness
        size = features.batch_size, values.numel(), values.device

        def find() -> Tensor:
            return self._numbers[id_features(features.offsets, list(hotness or ()), *size)]

        return find() if hotness is None else self._of_forms.get((hotness, *size), find)


def num_of_samples(features: SparseFeatures, is_counted: Tensor) -> Tensor:
    """How many ids of each sample are counted, int32 ``[B]``; waits for nothing.

    Args:
        features: B samples.
        is_counted: bool ``[L]``, for each id.
    """
    if features.hotness is not None and len(set(features.hotness)) == 1:
        # Of one dtype throughout, so that it is one launch.
        by_sample = is_counted.view(len(features.keys), features.batch_size, features.hotness[0])
        return by_sample.sum((0, 2), dtype=torch.int32)
    offsets = with_offsets(features).offsets
    assert offsets is not None
    before = torch.nn.functional.pad(is_counted.cumsum(0), (1, 0))
    of_bags = before[offsets.long()].diff()
    return of_bags.view(len(features.keys), features.batch_size).sum(0).int()
