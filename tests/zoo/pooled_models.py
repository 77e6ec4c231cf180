"""Models of clicks over pooled vectors, as their papers have them."""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.zoo.batches import (
    bags,
    bags_between_offsets,
    clicks_of_two_sizes,
    jagged_clicks,
    keys,
    tuples_of_ids,
    weighted_bags,
)
from tests.zoo.entries import Family
from tests.zoo.sizes import Sizes
from torchembed import HostMemory, SparseFeatures
from torchembed.models import (
    DCN,
    DLRM,
    DNN,
    AutoInt,
    DCNv2,
    DeepFM,
    DLRM_DCNv2,
    DLRMInteraction,
    FactorizationMachine,
    LogisticRegression,
    WideAndDeep,
    XDeepFM,
)

POOLED = Family("pooled")


def tables(
    sizes: Sizes, dim: int | None = None, prefix: str = "", storage: HostMemory | None = None
) -> nn.Module:
    """A collection with a table for each sparse feature."""
    return torchembed.EmbeddingBagCollection(
        tables=[
            torchembed.EmbeddingBagConfig(
                name=prefix + key,
                num_embeddings=sizes.num_rows,
                embedding_dim=dim or sizes.dim,
                feature_names=(key,),
                storage=storage,
            )
            for key in keys(sizes)
        ],
        device=sizes.device,
    )


def layers(*widths: int, last: type[nn.Module] | None = None) -> nn.Sequential:
    """Linear layers with rectifiers between them."""
    modules: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        modules += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*modules[:-1], *([last()] if last else []))


class Pooled(nn.Module):
    """Base of the models: looks all features up as ``[B, F, D]``, by default in a table each."""

    def __init__(self, sizes: Sizes, collection: nn.Module | None = None) -> None:
        super().__init__()
        self.sizes = sizes
        self.tables = tables(sizes) if collection is None else collection
        self.width = sizes.num_features * sizes.dim

    def vectors(self, sparse: SparseFeatures) -> Tensor:
        """``[B, F, D]``."""
        sizes = self.sizes
        return self.tables(sparse).values().view(-1, sizes.num_features, sizes.dim)


class LibraryModel(nn.Module):
    """Base of the entries that are the library's models."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return self.model(dense, sparse)


def weights(sizes: Sizes) -> nn.Module:
    """A collection with a weight for each id."""
    return tables(sizes, dim=1, prefix="linear_")


@POOLED.model("logistic regression")
class LogisticRegressionModel(LibraryModel):
    """The library's: a weight for each id."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(LogisticRegression(weights(sizes), dense_in_features=sizes.num_dense))


@POOLED.model("FM")
class FM(LibraryModel):
    """The library's: products of all pairs of vectors, by the square of their sum."""

    def __init__(self, sizes: Sizes) -> None:
        collections = tables(sizes), weights(sizes)
        super().__init__(FactorizationMachine(*collections, dense_in_features=sizes.num_dense))


@POOLED.model("DNN")
class DNNModel(LibraryModel):
    """The library's: an MLP, with batch norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(
            DNN(
                tables(sizes),
                layer_sizes=[sizes.hidden, sizes.hidden],
                batch_norm=True,
                dense_in_features=sizes.num_dense,
            )
        )


@POOLED.model("Wide & Deep")
class WideAndDeepModel(LibraryModel):
    """The library's: a linear part with tables of its own beside a deep one."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(
            WideAndDeep(
                tables(sizes),
                weights(sizes),
                layer_sizes=[sizes.hidden, sizes.hidden],
                dense_in_features=sizes.num_dense,
            )
        )


@POOLED.model("DeepFM")
class DeepFMModel(LibraryModel):
    """The library's: a factorization machine and a deep part over the same vectors."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(
            DeepFM(
                tables(sizes),
                weights(sizes),
                layer_sizes=[sizes.hidden],
                dense_in_features=sizes.num_dense,
            )
        )


@POOLED.model("batches of two sizes in turns", clicks_of_two_sizes)
class DeepFMOfTwoSizes(DeepFMModel):
    """DeepFM, trained by batches that are large or small."""


@POOLED.model("a bag between offsets", bags_between_offsets, computes_loss=True)
class BagBetweenOffsets(nn.Module):
    """Weighted ids as a flat tensor, as ``torch.nn.EmbeddingBag`` takes them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.bag = torchembed.EmbeddingBag(
            sizes.num_rows, sizes.dim, mode="sum", device=sizes.device, seed=0
        )
        self.deep = layers(sizes.dim, sizes.hidden, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = self.bag(batch["values"], batch["offsets"], batch["weights"])
        return F.binary_cross_entropy_with_logits(self.deep(vectors)[:, 0], batch["label"])


@POOLED.model("NFM")
class NFM(Pooled):
    """Layers over the pooled products of pairs, with batch norm and dropout."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.norm, self.drop = nn.BatchNorm1d(sizes.dim), nn.Dropout(0.2)
        self.deep = layers(sizes.dim, sizes.hidden, 1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        vectors = self.vectors(sparse)
        pairs = 0.5 * (vectors.sum(1) ** 2 - (vectors**2).sum(1))
        return self.deep(self.drop(self.norm(pairs)))


@POOLED.model("AFM")
class AFM(Pooled):
    """Attention over the products of pairs."""

    first: Tensor
    second: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        first, second = torch.triu_indices(sizes.num_features, sizes.num_features, offset=1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)
        self.attention = nn.Sequential(
            nn.Linear(sizes.dim, sizes.hidden), nn.ReLU(), nn.Linear(sizes.hidden, 1, bias=False)
        )
        self.logit = nn.Linear(sizes.dim, 1, bias=False)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        vectors = self.vectors(sparse)
        products = vectors[:, self.first] * vectors[:, self.second]
        weights = self.attention(products).softmax(dim=1)
        return self.logit((weights * products).sum(1))


@POOLED.model("PNN")
class PNN(Pooled):
    """Inner products of pairs beside the vectors."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.deep = layers(self.width + sizes.num_features**2, sizes.hidden, 1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        vectors = self.vectors(sparse)
        products = torch.einsum("bfd,bgd->bfg", vectors, vectors)
        return self.deep(torch.cat([vectors.flatten(1), products.flatten(1)], dim=1))


@POOLED.model("DCN")
class DCNModel(LibraryModel):
    """The library's: cross layers with a vector each."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(
            DCN(
                tables(sizes),
                num_cross_layers=3,
                layer_sizes=[sizes.hidden, sizes.hidden],
                dense_in_features=sizes.num_dense,
            )
        )


@POOLED.model("DCNv2")
class DCNv2Model(LibraryModel):
    """The library's, with full cross layers."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(
            DCNv2(
                tables(sizes),
                num_cross_layers=2,
                layer_sizes=[sizes.hidden, sizes.hidden],
                dense_in_features=sizes.num_dense,
            )
        )


@POOLED.model("DCN-Mix")
class DCNMix(Pooled):
    """Low-rank cross layers with experts and a gate."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        rank = 4
        self.down = nn.Parameter(torch.randn(2, self.width, rank) * 0.1)
        self.middle = nn.Parameter(torch.randn(2, rank, rank) * 0.1)
        self.up = nn.Parameter(torch.randn(2, rank, self.width) * 0.1)
        self.gate = nn.Linear(self.width, 2)
        self.logit = nn.Linear(self.width, 1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        first = self.vectors(sparse).flatten(1)
        x = first
        for _ in range(2):
            inner = torch.einsum("bn,enr->ber", x, self.down).tanh()
            inner = torch.einsum("ber,ers->bes", inner, self.middle).tanh()
            outer = torch.einsum("bes,esn->ben", inner, self.up) * first[:, None]
            x = torch.einsum("ben,be->bn", outer, self.gate(x).softmax(1)) + x
        return self.logit(x)


@POOLED.model("DLRM")
class DLRMModel(LibraryModel):
    """The library's, with dot products."""

    def __init__(self, sizes: Sizes) -> None:
        layers = [sizes.hidden, sizes.dim], [16, 1]
        super().__init__(DLRM(tables(sizes), sizes.num_dense, *layers))


@POOLED.model("DLRM of sparse features alone")
class SparseDLRMModel(LibraryModel):
    """The library's, without dense features and with vectors side by side."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(
            DLRM(tables(sizes), 0, [], [16, 1], interaction=DLRMInteraction.CONCATENATION)
        )


@POOLED.model("DLRM-DCNv2", bags)
class DLRMDCNv2Model(LibraryModel):
    """MLPerf's model, with one to three ids of a feature."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(
            DLRM_DCNv2(
                tables(sizes),
                dense_in_features=sizes.num_dense,
                dense_arch_layer_sizes=[sizes.hidden, sizes.dim],
                over_arch_layer_sizes=[sizes.hidden, 1],
                dcn_num_layers=2,
                dcn_low_rank_dim=8,
            )
        )


@POOLED.model("xDeepFM")
class XDeepFMModel(LibraryModel):
    """The library's: a compressed interaction network."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(
            XDeepFM(
                tables(sizes),
                weights(sizes),
                cin_layer_sizes=[6, 6],
                layer_sizes=[sizes.hidden],
                dense_in_features=sizes.num_dense,
            )
        )


@POOLED.model("torchembed's AutoInt")
class AutoIntModel(LibraryModel):
    """The library's: attention of features, and an MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(
            AutoInt(
                tables(sizes),
                num_attention_layers=2,
                attention_dim=16,
                num_heads=2,
                layer_sizes=[sizes.hidden],
                dense_in_features=sizes.num_dense,
            )
        )


@POOLED.model("AutoInt")
class AutoIntOfTorchsLayers(Pooled):
    """Self-attention over features, by torch's layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(sizes.dim, 2, batch_first=True) for _ in range(2)
        )
        self.logit = nn.Linear(self.width, 1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.vectors(sparse)
        for attention in self.attention:
            x = F.relu(attention(x, x, x, need_weights=False)[0] + x)
        return self.logit(x.flatten(1))


@POOLED.model("FiBiNET")
class FiBiNET(Pooled):
    """Squeeze and excitation of features, then bilinear products of pairs."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        count = sizes.num_features
        self.excite = layers(count, max(count // 2, 1), count, last=nn.ReLU)
        self.bilinear = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.logit = layers(2 * self.width, sizes.hidden, 1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        vectors = self.vectors(sparse)
        excited = vectors * self.excite(vectors.mean(2)).unsqueeze(2)
        products = [self.bilinear(v) * v.roll(1, dims=1) for v in (vectors, excited)]
        return self.logit(torch.cat(products, dim=1).flatten(1))


@POOLED.model("MaskNet")
class MaskNet(Pooled):
    """Masks made of the vectors themselves, with layer norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.norm = nn.LayerNorm(sizes.dim)
        self.mask = layers(self.width, sizes.hidden, self.width)
        self.block = nn.Sequential(nn.Linear(self.width, sizes.hidden), nn.LayerNorm(sizes.hidden))
        self.logit = nn.Linear(sizes.hidden, 1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        vectors = self.vectors(sparse)
        masked = self.mask(vectors.flatten(1)) * self.norm(vectors).flatten(1)
        return self.logit(self.block(masked).relu())


@POOLED.model("FinalMLP")
class FinalMLP(Pooled):
    """Two gated streams and their bilinear product."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.gates = nn.ParameterList(torch.zeros(self.width) for _ in range(2))
        self.streams = nn.ModuleList(layers(self.width, sizes.hidden, 8) for _ in range(2))
        self.fusion = nn.Bilinear(8, 8, 1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        flat = self.vectors(sparse).flatten(1)
        one, other = (
            stream(flat * 2 * gate.sigmoid())
            for stream, gate in zip(self.streams, self.gates, strict=True)
        )
        return self.fusion(one, other)


class DotProducts(nn.Module):
    """The dense part of a DLRM whose products are all squared, and its loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.bottom = layers(sizes.num_dense, sizes.hidden, sizes.dim)
        count = sizes.num_features + 1
        self.top = layers(sizes.dim + count * count, sizes.hidden, 1)

    def forward(self, dense: Tensor, found: Sequence[Tensor]) -> Tensor:
        """The logits ``[B]`` for dense features and a vector ``[B, D]`` of each sparse feature."""
        dense = self.bottom(dense)
        stacked = torch.stack([dense, *found], dim=1)
        products = (stacked @ stacked.mT).flatten(1)
        return self.top(torch.cat([dense, products], dim=1))[:, 0]


@POOLED.model("DLRM of separate modules", tuples_of_ids, computes_loss=True)
class SeparateModules(nn.Module):
    """An ``EmbeddingBag`` for each feature, as the original DLRM has them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            torchembed.EmbeddingBag(
                sizes.num_rows, sizes.dim, mode="sum", device=sizes.device, seed=number
            )
            for number in range(sizes.num_features)
        )
        self.products = DotProducts(sizes)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        found = [bag(ids.unsqueeze(1)) for bag, ids in zip(self.bags, batch["ids"], strict=True)]
        logits = self.products(batch["dense"], found)
        return F.binary_cross_entropy_with_logits(logits, batch["label"])


@POOLED.model("separate modules of several modes", tuples_of_ids, computes_loss=True)
class SeveralModes(nn.Module):
    """Sums, means and maxima of bags, with and without padding, and single vectors."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        shape, device = (sizes.num_rows, sizes.dim), sizes.device
        self.bags = nn.ModuleList(
            torchembed.EmbeddingBag(
                *shape, mode=mode, padding_idx=padding, device=device, seed=number
            )
            for number, (mode, padding) in enumerate(
                itertools.product(["sum", "mean", "max"], [None, 3])
            )
        )
        self.users = torchembed.Embedding(*shape, padding_idx=0, device=device, seed=6)
        self.out = layers(7 * sizes.dim + sizes.num_dense, sizes.hidden, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        pair, user = batch["ids"][:2].T, batch["ids"][2]
        found = [bag(pair) for bag in self.bags]
        flat = torch.cat([*found, self.users(user), batch["dense"]], dim=1)
        return F.binary_cross_entropy_with_logits(self.out(flat)[:, 0], batch["label"])


@POOLED.model("DLRM of one collection")
class OneCollection(Pooled):
    """The same model with one collection for all features."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.products = DotProducts(sizes)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return self.products(dense, self.vectors(sparse).unbind(1))


@POOLED.model("weighted bags", weighted_bags)
class WeightedBags(nn.Module):
    """Ids with weights, as counts of what a user did."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tables = torchembed.EmbeddingBagCollection(
            tables=[
                torchembed.EmbeddingBagConfig(
                    name=key,
                    num_embeddings=sizes.num_rows,
                    embedding_dim=sizes.dim,
                    feature_names=(key,),
                )
                for key in keys(sizes)
            ],
            is_weighted=True,
            device=sizes.device,
        )
        self.deep = layers(sizes.num_features * sizes.dim, sizes.hidden, 1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return self.deep(self.tables(sparse).values())


@POOLED.model("one table for two features")
class SharedTable(nn.Module):
    """Features that share a table."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tables = torchembed.EmbeddingBagCollection(
            tables=[
                torchembed.EmbeddingBagConfig(
                    name="shared",
                    num_embeddings=sizes.num_rows,
                    embedding_dim=sizes.dim,
                    feature_names=keys(sizes),
                )
            ],
            device=sizes.device,
        )
        self.deep = layers(sizes.num_features * sizes.dim, sizes.hidden, 1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return self.deep(self.tables(sparse).values())


@POOLED.model("DeepFM with jagged bags", jagged_clicks)
class JaggedDeepFM(DeepFMModel):
    """Bags of different lengths."""
