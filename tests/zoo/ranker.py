"""The model that habits are shown on."""

import torch
from torch import Tensor, nn

from tests.zoo.entries import Case, beside_tables
from tests.zoo.pooled_models import Pooled, layers
from tests.zoo.sizes import Sizes
from torchembed import SparseFeatures


class Ranker(Pooled):
    """Layers over dense features and pooled vectors, to a logit ``[B, 1]``."""

    def __init__(self, sizes: Sizes, collection: nn.Module | None = None) -> None:
        super().__init__(sizes, collection)
        self.deep = layers(sizes.num_dense + self.width, sizes.hidden, sizes.hidden, 1)

    def weight(self, number: int) -> nn.Parameter:
        """The weight of a layer of ``deep``."""
        return self.deep.get_parameter(f"{number}.weight")

    def features(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        """``[B, num_dense + F * D]``."""
        return torch.cat([dense, self.vectors(sparse).flatten(1)], dim=1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return self.deep(self.features(dense, sparse))


def with_adam(model: nn.Module, lr: float = 0.01) -> Case:
    """A fused optimizer of tables and torch's Adam."""
    return Case(model=model, optimizers=beside_tables(model, lambda p: torch.optim.Adam(p, lr=lr)))
