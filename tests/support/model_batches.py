"""Small collections of tables and batches of clicks to run models on."""

from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.bags import random_jagged
from tests.support.values import normal
from torchembed.core.features import SparseFeatures
from torchembed.core.types import Pooling
from torchembed.modules import EmbeddingBagCollection, EmbeddingBagConfig

NUM_ROWS = 23
KEYS = ("user", "item", "genre")


class Clicks(NamedTuple):
    """One batch: dense features, sparse ones, and the gradient of the logits."""

    dense: Tensor
    sparse: SparseFeatures
    grad: Tensor


def collection(device: torch.device | str, *dims: int) -> EmbeddingBagCollection:
    """Two tables; the second serves two features and takes their mean."""
    first, second = dims
    tables = [
        EmbeddingBagConfig(
            name="users", num_embeddings=NUM_ROWS, embedding_dim=first, feature_names=KEYS[:1]
        ),
        EmbeddingBagConfig(
            name="goods",
            num_embeddings=NUM_ROWS,
            embedding_dim=second,
            feature_names=KEYS[1:],
            pooling=Pooling.MEAN,
        ),
    ]
    return EmbeddingBagCollection(tables, device=device)


def clicks(device: torch.device | str, *, batch_size: int = 6, num_dense: int = 5) -> Clicks:
    """A random batch."""
    bags = random_jagged(len(KEYS), batch_size, NUM_ROWS, missing=0.0)
    sparse = SparseFeatures(
        keys=KEYS, values=bags.rows, batch_size=batch_size, offsets=bags.offsets
    )
    return Clicks(
        normal(batch_size, num_dense, seed=7, device=device),
        sparse.to(device),
        normal(batch_size, 1, seed=8, device=device),
    )
