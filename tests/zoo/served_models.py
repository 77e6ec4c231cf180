"""Small models of the shapes that users have, with requests of any size for them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import torchembed
from torchembed import EmbeddingBagConfig, EmbeddingConfig, SparseFeatures
from torchembed.models import DLRM, DLRM_DCNv2

NUM_ROWS = 31


class ServedCase(NamedTuple):
    """A model with what it is asked.

    Attributes:
        examples: arguments of a number of samples.
        request: the same arguments as a request has them.
        features: names of its features.
        inputs: names of its dense inputs.
    """

    model: nn.Module
    examples: Callable[[int], Any]
    request: Callable[[Any], dict[str, np.ndarray]]
    features: list[str]
    inputs: list[str]


def bags(
    num_features: int, dim: int, *, weighted: bool = False, **table: Any
) -> torchembed.EmbeddingBagCollection:
    """A collection of one table for each feature ``f0``, ``f1``, ...; every other one has means."""
    configs = [
        EmbeddingBagConfig(
            name=f"t{n}",
            num_embeddings=NUM_ROWS + n,
            embedding_dim=dim,
            feature_names=(f"f{n}",),
            pooling="mean" if n % 2 and not weighted else "sum",  # type: ignore[arg-type]
            **table,
        )
        for n in range(num_features)
    ]
    return torchembed.EmbeddingBagCollection(tables=configs, is_weighted=weighted)


def fixed(batch_size: int, hotness: tuple[int, ...], *, weighted: bool = False) -> SparseFeatures:
    """Features ``f0``, ``f1``, ... of fixed hotness."""
    num_ids = batch_size * sum(hotness)
    return SparseFeatures(
        keys=tuple(f"f{n}" for n in range(len(hotness))),
        values=torch.randint(NUM_ROWS, (num_ids,)),
        hotness=hotness,
        batch_size=batch_size,
        weights=torch.rand(num_ids) if weighted else None,
    )


def jagged(batch_size: int, keys: tuple[str, ...], max_length: int = 4) -> SparseFeatures:
    """Features of up to ``max_length`` ids."""
    lengths = torch.randint(max_length + 1, (len(keys) * batch_size,))
    return SparseFeatures(
        keys=keys,
        values=torch.randint(NUM_ROWS, (int(lengths.sum()),)),
        offsets=nn.functional.pad(lengths.cumsum(0), (1, 0)),
        batch_size=batch_size,
    )


def feature_arrays(features: SparseFeatures) -> dict[str, np.ndarray]:
    """Features as a request has them."""
    arrays: dict[str, np.ndarray] = {}
    lengths = features.lengths()
    ends = lengths.sum(1).cumsum(0).tolist()
    for place, key in enumerate(features.keys):
        ids = slice(ends[place] - int(lengths[place].sum()), ends[place])
        parts = {key: features.values[ids].long()}
        if features.weights is not None:
            parts[f"{key}.weights"] = features.weights[ids]
        if features.hotness is not None:
            parts = {n: p.view(features.batch_size, -1) for n, p in parts.items()}
        else:
            parts[f"{key}.lengths"] = lengths[place].int()
        arrays |= {name: part.numpy() for name, part in parts.items()}
    return arrays


def _clicks(model: nn.Module, hotness: tuple[int, ...], *, weighted: bool = False) -> ServedCase:
    return ServedCase(
        model,
        lambda n: (torch.randn(n, 5), fixed(n, hotness, weighted=weighted)),
        lambda args: {"dense_features": args[0].numpy(), **feature_arrays(args[1])},
        [f"f{n}" for n in range(len(hotness))],
        ["dense_features"],
    )


def dlrm() -> ServedCase:
    """DLRM of one id for each feature."""
    return _clicks(DLRM(bags(3, 8), 5, [16, 8], [16, 1]), (1, 1, 1))


def dcnv2() -> ServedCase:
    """DLRM-DCNv2 of several ids for each feature."""
    return _clicks(DLRM_DCNv2(bags(3, 8), 5, [16, 8], [16, 1], 2, 4), (3, 1, 2))


def weighted() -> ServedCase:
    """DLRM of weighted ids."""
    return _clicks(DLRM(bags(2, 8, weighted=True), 5, [8], [4, 1]), (2, 3), weighted=True)


class _DeepFM(nn.Module):
    """Vectors and first-order weights of the same features, out of two collections."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.first = bags(3, 4), bags(3, 1)
        self.deep = nn.Sequential(nn.Linear(14, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, dense_features: Tensor, sparse_features: SparseFeatures) -> Tensor:
        vectors = self.vectors(sparse_features).values().unflatten(1, (3, 4))
        products = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
        first = self.first(sparse_features).values().sum(1)
        deep = self.deep(torch.cat([dense_features[:, :2], vectors.flatten(1)], 1))[:, 0]
        return products + first + deep


def deepfm() -> ServedCase:
    """A model whose collections have tables of the same names."""
    return _clicks(_DeepFM(), (1, 2, 1))


class _Tasks(nn.Module):
    """Experts for two tasks over jagged features, out of a batch with two dense inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = bags(2, 6)
        self.experts = nn.ModuleList(nn.Linear(12 + 3 + 2, 4) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(12 + 3 + 2, 3) for _ in range(2))
        self.towers = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        pooled = self.bags(batch["sparse"]).values()
        x = torch.cat([pooled, batch["user"], batch["context"]], 1)
        experts = torch.stack([expert(x) for expert in self.experts], 1)
        found = {}
        for task, gate, tower in zip(("click", "buy"), self.gates, self.towers, strict=True):
            found[task] = tower((gate(x).softmax(1).unsqueeze(2) * experts).sum(1))[:, 0]
        return found


def tasks() -> ServedCase:
    """A model of two tasks, which takes one argument."""
    return ServedCase(
        _Tasks(),
        lambda n: {
            "sparse": jagged(n, ("f0", "f1")),
            "user": torch.randn(n, 3),
            "context": torch.randn(n, 2),
        },
        lambda batch: {
            "user": batch["user"].numpy(),
            "context": batch["context"].numpy(),
            **feature_arrays(batch["sparse"]),
        },
        ["f0", "f1"],
        ["user", "context"],
    )


class History(NamedTuple):
    """A history, 0 where it is shorter, and a target."""

    items: Tensor
    target: Tensor


class _DIN(nn.Module):
    """Attention of a target to a padded history, by one table of items."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torchembed.Embedding(NUM_ROWS, 4, padding_idx=0)
        self.users = torchembed.EmbeddingBag(NUM_ROWS, 4, mode="mean", padding_idx=0)
        self.attention, self.deep = nn.Linear(8, 1), nn.Linear(12, 1)

    def forward(self, batch: History) -> Tensor:
        history, target = self.items(batch.items), self.items(batch.target)
        pairs = torch.cat([history, target.unsqueeze(1).expand_as(history)], 2)
        scores = self.attention(pairs)[..., 0].masked_fill(batch.items == 0, -1e9)
        interest = (scores.softmax(1).unsqueeze(2) * history).sum(1)
        return self.deep(torch.cat([interest, target, self.users(batch.items)], 1))[:, 0]


def din() -> ServedCase:
    """A sequence model over single tables, which masks by ids."""
    return ServedCase(
        _DIN(),
        lambda n: History(torch.randint(NUM_ROWS, (n, 5)), torch.randint(1, NUM_ROWS, (n,))),
        lambda batch: {
            "items": batch.items.numpy(),
            "target": batch.target.view(-1, 1).numpy(),
        },
        ["items", "target"],
        [],
    )


class _JaggedAttention(nn.Module):
    """Attention of a target to a jagged history, by a collection."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(
            name="item", num_embeddings=NUM_ROWS, embedding_dim=4, feature_names=("seen", "target")
        )
        self.items = torchembed.EmbeddingCollection(tables=[config])
        self.deep = nn.Linear(8, 1)

    def forward(self, seen: SparseFeatures) -> Tensor:
        found = self.items(seen)
        target = found["target"].values()
        history = found["seen"].to_padded_dense(4)
        places = torch.arange(4, device=history.device)
        mask = places < found["seen"].lengths().unsqueeze(1)
        scores = (history * target.unsqueeze(1)).sum(2).masked_fill(~mask, -1e9).softmax(1)
        return self.deep(torch.cat([(scores.unsqueeze(2) * history).sum(1), target], 1))


def sequence() -> ServedCase:
    """A sequence model over a jagged feature and a fixed one."""

    def examples(n: int) -> SparseFeatures:
        lengths = torch.cat([torch.randint(5, (n,)), torch.ones(n, dtype=torch.int64)])
        return SparseFeatures(
            keys=("seen", "target"),
            values=torch.randint(NUM_ROWS, (int(lengths.sum()),)),
            offsets=nn.functional.pad(lengths.cumsum(0), (1, 0)),
            batch_size=n,
        )

    def request(features: SparseFeatures) -> dict[str, np.ndarray]:
        # The model takes exactly one target of each sample, so that it has no lengths.
        arrays = feature_arrays(features)
        del arrays["target.lengths"]
        return arrays | {"target": arrays["target"].reshape(-1, 1)}

    return ServedCase(_JaggedAttention(), examples, request, ["seen", "target"], [])


class _Columns(nn.Module):
    """A module for each column of ids, and bags between offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(torchembed.Embedding(NUM_ROWS, 4) for _ in range(2))
        self.bag = torchembed.EmbeddingBag(NUM_ROWS, 4, mode="sum")
        self.deep = nn.Linear(12, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        found = [table(batch["ids"][:, n]) for n, table in enumerate(self.tables)]
        found.append(self.bag(batch["values"], batch["offsets"], batch["weights"]))
        return self.deep(torch.cat(found, 1))


def columns() -> ServedCase:
    """Single modules, fed by columns and offsets."""

    def examples(n: int) -> dict[str, Tensor]:
        lengths = torch.randint(4, (n,))
        num_ids = int(lengths.sum())
        return {
            "ids": torch.randint(NUM_ROWS, (n, 2)),
            "values": torch.randint(NUM_ROWS, (num_ids,)),
            "offsets": lengths.cumsum(0) - lengths,
            "weights": torch.rand(num_ids),
        }

    def request(batch: dict[str, Tensor]) -> dict[str, np.ndarray]:
        ends = torch.cat([batch["offsets"], torch.tensor([len(batch["values"])])])
        return {
            "ids.0": batch["ids"][:, :1].numpy(),
            "ids.1": batch["ids"][:, 1:].numpy(),
            "values": batch["values"].numpy(),
            "values.lengths": ends.diff().int().numpy(),
            "values.weights": batch["weights"].numpy(),
        }

    return ServedCase(_Columns(), examples, request, ["ids.0", "ids.1", "values"], [])


MODELS: dict[str, Callable[[], ServedCase]] = {
    "dlrm": dlrm,
    "dcnv2": dcnv2,
    "weighted": weighted,
    "deepfm": deepfm,
    "tasks": tasks,
    "din": din,
    "sequence": sequence,
    "columns": columns,
}
