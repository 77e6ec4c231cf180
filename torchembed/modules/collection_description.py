"""The description of a collection, for what shards it, plans it or puts another in its place."""

import dataclasses
from collections.abc import Hashable

import torch

from torchembed.core.types import OnBadId
from torchembed.modules.configs import EmbeddingConfig
from torchembed.ops.row_gradients import WeightGradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectionDescription:
    """The tables and features that a collection looks up, and how; the same on all ranks.

    Attributes:
        configs: of the whole tables, in order.
        container: the attribute under which the tables' weights are.
        is_pooled: True for a vector for each bag, False for one for each id.
        is_weighted: whether ids have weights.
        on_bad_id: what becomes of ids outside their table.
        output_dtype: of the vectors.
        casts_vectors: whether what casts the module also casts the vectors that it gives.
        weight_form: form of the gradient of a weight without a fused optimizer.
        lookup_keys: for each table what it must have in common with others, besides dim and dtype,
            to be looked up in one call.
        reserved_columns: columns in memory before the pooled vectors.
    """

    configs: tuple[EmbeddingConfig, ...]
    container: str
    is_pooled: bool
    is_weighted: bool = False
    on_bad_id: OnBadId
    output_dtype: torch.dtype
    casts_vectors: bool = False
    weight_form: WeightGradient
    lookup_keys: tuple[Hashable, ...]
    reserved_columns: int = 0
