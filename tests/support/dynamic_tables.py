"""A collection of dynamic tables, small enough to follow by hand, and what its tables hold."""

import torch

from torchembed import (
    Dynamic,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    SparseFeatures,
)
from torchembed.tables import HashIndex


def two_and_a_static_one(capacity: int, dynamic: Dynamic) -> EmbeddingBagCollection:
    """The dynamic tables a and b of one group, and the static table c, all of ``capacity`` rows."""
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=capacity,
                embedding_dim=2,
                feature_names=(name,),
                dynamic=of_table,
            )
            for name, of_table in (("a", dynamic), ("b", dynamic), ("c", None))
        ]
    )


def one_bag_each(a: list[int], b: list[int]) -> SparseFeatures:
    """A sample with the ids ``a`` and ``b`` of the dynamic tables, and id 0 of the static one."""
    offsets = torch.tensor([0, len(a), len(a) + len(b), len(a) + len(b) + 1])
    values = torch.tensor([*a, *b, 0])
    return SparseFeatures(keys=("a", "b", "c"), values=values, batch_size=1, offsets=offsets)


def train_on(
    module: EmbeddingBagCollection, optimizer: torch.optim.Optimizer, a: list[int], b: list[int]
) -> None:
    """One step of the sum of squares, on one bag of each table."""
    module(one_bag_each(a, b)).values().square().sum().backward()
    optimizer.step()


def index_of(module: EmbeddingBagCollection | EmbeddingCollection) -> HashIndex:
    """The index of a module whose dynamic tables are one group."""
    (index,) = [
        group.index
        for group in module.table_set.current_groups()
        if isinstance(group.index, HashIndex)
    ]
    return index


def ids_held(module: EmbeddingBagCollection | EmbeddingCollection) -> set[int]:
    """The ids that the dynamic tables of such a module hold, all together."""
    state = index_of(module).hash_tables
    return set(state.keys[state.digests > 0].tolist())
