"""Numbers that are drawn, counted or made on the host while a model is trained."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.zoo.batches import jagged_clicks
from tests.zoo.entries import Family
from tests.zoo.ranker import Ranker
from tests.zoo.sizes import Sizes
from torchembed import SparseFeatures

RANDOM = Family("random and host numbers")


@RANDOM.model("dropout")
class Dropout(Ranker):
    """Features are dropped."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return self.deep(F.dropout(self.features(dense, sparse), 0.3, self.training))


@RANDOM.model("noise in forward")
class Noise(Ranker):
    """Normal noise on features."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.features(dense, sparse)
        return self.deep(x + 0.1 * torch.randn_like(x))


@RANDOM.model("features masked at random")
class Masked(Ranker):
    """Whole features are left out."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        vectors = self.vectors(sparse)
        kept = torch.bernoulli(torch.full(vectors.shape[:2], 0.8, device=vectors.device))
        return self.deep(torch.cat([dense, (vectors * kept.unsqueeze(2)).flatten(1)], dim=1))


@RANDOM.model("mixup")
class Mixup(Ranker):
    """Samples are mixed with others."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.features(dense, sparse)
        return self.deep(0.8 * x + 0.2 * x[torch.randperm(len(x), device=x.device)])


@RANDOM.model("Gumbel softmax over features")
class Gumbel(Ranker):
    """A feature is drawn, with its gradient."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.choice = torch.nn.Parameter(torch.zeros(sizes.num_features))

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        chosen = F.gumbel_softmax(self.choice.expand(len(dense), -1), hard=True)
        vectors = self.vectors(sparse) * chosen.unsqueeze(2)
        return self.deep(torch.cat([dense, vectors.flatten(1)], dim=1))


class Seeded(Ranker):
    """Base of models that draw numbers of the host: each copy draws the same."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        random.seed(0)
        self.generator = np.random.default_rng(0)


@RANDOM.model("layers skipped by Python's random numbers")
class StochasticDepth(Seeded):
    """A layer is left out every other time, by chance."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.deep[1](self.deep[0](self.features(dense, sparse)))
        if random.random() < 0.5:
            x = self.deep[3](self.deep[2](x))
        return self.deep[4](x)


@RANDOM.model("a factor of Python's random numbers")
class RandomFactor(Seeded):
    """Logits are scaled by chance."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return super().forward(dense, sparse) * random.uniform(0.5, 1.5)


@RANDOM.model("noise of NumPy")
class NumPyNoise(Seeded):
    """Noise is made by NumPy and copied to the device."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.features(dense, sparse)
        noise = torch.from_numpy(self.generator.standard_normal(x.shape[1], dtype=np.float32))
        return self.deep(x + 0.1 * noise.to(x.device))


@RANDOM.model("a number of NumPy")
class NumPyFactor(Seeded):
    """Logits are scaled by a number of NumPy."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return super().forward(dense, sparse) * float(self.generator.uniform(0.5, 1.5))


class Counting(Ranker):
    """Base of models that count their steps."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.num_steps = 0


@RANDOM.model("annealing by a Python counter")
class Annealed(Counting):
    """A temperature falls with the steps that forward counts."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        self.num_steps += 1
        return super().forward(dense, sparse) / (1 + 1 / self.num_steps)


@RANDOM.model("annealing by a Python counter, with jagged bags", jagged_clicks)
class AnnealedJagged(Annealed):
    """The same over bags of different lengths."""


@RANDOM.model("annealing by a tensor made in forward")
class AnnealedByTensor(Counting):
    """The temperature is made a tensor on the host."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        self.num_steps += 1
        return super().forward(dense, sparse) * torch.tensor(1 - 0.5**self.num_steps)


@RANDOM.model("annealing by a buffer")
class AnnealedByBuffer(Ranker):
    """The temperature follows a buffer that forward adds to."""

    count: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        self.count += 1
        return super().forward(dense, sparse) * (1 - 0.5**self.count)


@RANDOM.model("a loss that warms up after some steps")
class WarmUpLoss(Counting):
    """A branch on a Python counter, which is False in the first steps."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        self.num_steps += 1
        logits = super().forward(dense, sparse)
        return logits.tanh() if self.num_steps > 8 else logits


@RANDOM.model("constants made in forward")
class Constants(Ranker):
    """A tensor of constants is made of a list at each call."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        factors = torch.tensor([0.5] * self.sizes.num_features, device=dense.device)
        vectors = self.vectors(sparse) * factors[:, None]
        return self.deep(torch.cat([dense, vectors.flatten(1)], dim=1))


@RANDOM.model("a branch on what tensors hold")
class Branch(Ranker):
    """A host decision on a value of the device."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.features(dense, sparse)
        return self.deep(x * 0.5 if x.abs().max() > 3 else x)


@RANDOM.model("samples selected by a mask")
class Selected(Ranker):
    """Half of the samples, by their dense feature, get another factor."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        logits = super().forward(dense, sparse)[:, 0]
        chosen = logits[dense[:, 0] > 0]
        return logits + chosen.sum() * 0.1


@RANDOM.model("a generator of its own")
class OwnGenerator(Ranker):
    """Noise of a generator that the model keeps."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.generator = torch.Generator(sizes.device).manual_seed(3)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.features(dense, sparse)
        noise = torch.rand(x.shape, generator=self.generator, device=x.device)
        return self.deep(x + 0.1 * noise)
