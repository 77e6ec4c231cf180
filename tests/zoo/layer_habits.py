"""Layers that people write or take from torch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from tests.zoo.entries import Case, Family, adagrad
from tests.zoo.pooled_models import layers
from tests.zoo.ranker import Ranker
from tests.zoo.sizes import Sizes
from torchembed import SparseFeatures

LAYERS = Family("layers")


@LAYERS.model("tied layers")
class Tied(Ranker):
    """A layer that is used twice."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.deep[1](self.deep[0](self.features(dense, sparse)))
        return self.deep[4](self.deep[2](self.deep[2](x)))


@LAYERS.model("weights shared by two modules")
class Shared(Ranker):
    """An encoder and a decoder with one weight."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.code = nn.Linear(self.width, sizes.hidden, bias=False)
        self.decode = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.decode.weight = self.weight(2)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.features(dense, sparse)
        code = self.decode(self.code(x[:, dense.shape[1] :]))
        return self.deep(x) + code.mean(1, keepdim=True)


@LAYERS.model("tables called twice")
class CalledTwice(Ranker):
    """The same features are looked up in two places."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return super().forward(dense, sparse) + self.vectors(sparse).mean((1, 2))[:, None]


@LAYERS.model("vectors detached for a part")
class Detached(Ranker):
    """A part of the model does not train the tables."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.features(dense, sparse)
        return self.deep(x) + self.deep(x.detach())


class Reversal(torch.autograd.Function):
    """Turns the sign of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -0.5 * grads[0]


class Quantized(torch.autograd.Function):
    """Rounds to steps of 1/16; gradients pass where values are within bounds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 16).round() / 16

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() < 2)


@LAYERS.model("gradient reversal")
class Adversary(Ranker):
    """A head against which the tables are trained."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.head = layers(self.width, sizes.hidden, 1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.features(dense, sparse)
        return self.deep(x) + self.head(Reversal.apply(x[:, dense.shape[1] :]))


@LAYERS.model("quantized features, straight through")
class StraightThrough(Ranker):
    """A function of one's own with saved tensors."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return self.deep(Quantized.apply(self.features(dense, sparse)))


@LAYERS.model("checkpointed layers")
class Checkpointed(Ranker):
    """Layers are computed again in backward."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.features(dense, sparse)
        return checkpoint(self.deep, x, use_reentrant=False, preserve_rng_state=False)


@LAYERS.model("checkpointed layers with dropout")
class CheckpointedDropout(Ranker):
    """The second computation draws the same numbers."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.deep.insert(1, nn.Dropout(0.3))

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return checkpoint(self.deep, self.features(dense, sparse), use_reentrant=False)


@LAYERS.model("checkpointed layers, reentrant")
class Reentrant(Ranker):
    """A backward within backward."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.features(dense, sparse)
        return checkpoint(self.deep, x, use_reentrant=True, preserve_rng_state=False)


@LAYERS.habit("spectral norm")
def spectral_norm(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    parametrizations.spectral_norm(model.deep[0])
    return Case(model=model, optimizers=[adagrad(model)])


@LAYERS.habit("weight norm")
def weight_norm(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    parametrizations.weight_norm(model.deep[0])
    return Case(model=model, optimizers=[adagrad(model)])


@LAYERS.habit("pruned layer")
def pruned(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    prune.l1_unstructured(model.deep[2], "weight", amount=0.3)
    return Case(model=model, optimizers=[adagrad(model)])


@LAYERS.model("group and instance norm")
class Norms(Ranker):
    """Normalizations without running statistics."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.group = nn.GroupNorm(2, sizes.num_features)
        self.rms = nn.RMSNorm(sizes.dim)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        vectors = self.rms(self.group(self.vectors(sparse)))
        return self.deep(torch.cat([dense, vectors.flatten(1)], dim=1))


@LAYERS.model("activations in place")
class InPlace(Ranker):
    """Rectifiers that write over their input."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.deep[1], self.deep[3] = nn.ReLU(inplace=True), nn.LeakyReLU(inplace=True)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.features(dense, sparse).clone()
        x[:, 0].mul_(2)
        return self.deep(x)


@LAYERS.model("experts chosen by their gate")
class TopExperts(Ranker):
    """The two best of four experts for each sample, computed densely."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        width = sizes.num_dense + self.width
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(layers(width, sizes.hidden, 1) for _ in range(4))

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.features(dense, sparse)
        best = self.gate(x).topk(2, dim=1)
        weights = torch.zeros(len(x), 4, device=x.device)
        weights = weights.scatter(1, best.indices, best.values.softmax(1))
        found = torch.cat([expert(x) for expert in self.experts], dim=1)
        return (weights * found).sum(1)


@LAYERS.model("ensemble by vmap")
class Ensemble(Ranker):
    """Members in one batched call."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        width = sizes.num_dense + self.width
        self.members = nn.Parameter(torch.randn(3, width, 1) * 0.1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.features(dense, sparse)
        found = torch.func.vmap(lambda weight: x @ weight)(self.members)
        return self.deep(x) + found.mean(0)


@LAYERS.model("dense features in buckets")
class Buckets(Ranker):
    """Dense features become ids by quantiles, and are looked up beside the others."""

    bounds: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.register_buffer("bounds", torch.linspace(-2, 2, 7))
        self.weights = nn.Embedding(8, 1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        ids = torch.bucketize(dense, self.bounds)
        return super().forward(dense, sparse) + self.weights(ids).sum(1)


@LAYERS.model("ids hashed in forward")
class Hashed(Ranker):
    """Ids are computed from those of the batch before they are looked up."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        hashed = SparseFeatures(
            keys=sparse.keys,
            values=(sparse.values * 7 + 3) % self.sizes.num_rows,
            hotness=sparse.hotness,
            batch_size=sparse.batch_size,
        )
        return super().forward(dense, hashed)


@LAYERS.model("a cell that loops in Python")
class Loop(Ranker):
    """A recurrent cell over features."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.cell = nn.LSTMCell(sizes.dim, sizes.hidden)
        self.logit = nn.Linear(sizes.hidden, 1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        state = None
        for vector in self.vectors(sparse).unbind(1):
            state = self.cell(vector, state)
        assert state is not None
        return self.logit(F.silu(state[0]))


@LAYERS.model("product with a sparse matrix")
class SparseProduct(Ranker):
    """A graph among features, as a sparse matrix."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.register_buffer("graph", torch.eye(sizes.num_features).roll(1, 0).to_sparse_coo())

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        vectors = self.vectors(sparse)
        flat = vectors.transpose(0, 1).flatten(1)
        mixed = torch.sparse.mm(self.get_buffer("graph"), flat)
        mixed = mixed.view(self.sizes.num_features, -1, self.sizes.dim).transpose(0, 1)
        return self.deep(torch.cat([dense, (vectors + mixed).flatten(1)], dim=1))
