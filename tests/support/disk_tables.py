"""A model whose tables may live on disk, its batches, and what its tables hold."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.support.tiny_model import step_by_hand
from torchembed import Dynamic, SparseFeatures
from torchembed.data import Batch
from torchembed.modules.table_module import TableModule
from torchembed.optim import Adam, split_parameters
from torchembed.tables import DiskGroup, Storage, Table, row_chunks

KEYS = ("a", "b", "c")
NUM_IDS = 60
DYNAMIC_ROWS = 40
"""Rows of a dynamic table, too few for all ids."""
LOSS = F.binary_cross_entropy_with_logits
_HOTNESS = (2, 1, 3)
_CHUNK_BYTES = 1 << 10


class StoredRanker(nn.Module):
    """A logit from pooled vectors of two tables, one of which two features use, and from a vector
    for each id of a third."""

    def __init__(
        self,
        storage: Storage | None,
        *,
        dynamic: Dynamic | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        settings: dict[str, Any] = {
            "num_embeddings": NUM_IDS if dynamic is None else DYNAMIC_ROWS,
            "embedding_dim": 4,
            "dynamic": dynamic,
            "storage": storage,
            "dtype": dtype,
        }
        bags, sequences = torchembed.EmbeddingBagConfig, torchembed.EmbeddingConfig
        self.bags = torchembed.EmbeddingBagCollection(
            [
                bags(name="a", feature_names=("a", "c"), **settings),
                bags(name="b", feature_names=("b",), **settings),
            ],
            device=device,
        )
        self.sequences = torchembed.EmbeddingCollection(
            [sequences(name="d", feature_names=("b",), **settings)], device=device
        )
        self.dense = nn.Sequential(nn.Linear(18, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        found = self.sequences(sparse)["b"]
        # Vectors of spare ids, behind the last bag, are added to a bag of their own.
        places = torch.arange(len(found.values()), device=dense.device)
        bags = torch.bucketize(places, found.offsets()[1:], right=True)
        sums = torch.zeros(len(dense) + 1, 4, device=dense.device)
        sums = sums.index_add(0, bags, found.values().float())
        vectors = self.bags(sparse).values().float()
        return self.dense(torch.cat([dense, vectors, sums[:-1]], dim=1))


def optimizers_of(
    model: nn.Module, kind: Callable[..., torch.optim.Optimizer] = Adam
) -> list[torch.optim.Optimizer]:
    tables, dense = split_parameters(model.parameters())
    return [kind(tables, lr=0.05), torch.optim.Adam(dense, lr=0.05)]


def batch(seed: int, *, is_jagged: bool = False) -> Batch:
    """Ids that come again and again, after a while."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(_HOTNESS).repeat_interleave(8)
    if is_jagged:
        lengths = torch.randint(4, (24,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    skewed = torch.rand(int(offsets[-1]), generator=generator) ** 2 * 20
    ids = (skewed.long() + 7 * seed) % NUM_IDS
    shape: dict[str, Any] = {"offsets": offsets} if is_jagged else {"hotness": _HOTNESS}
    sparse = SparseFeatures(keys=KEYS, values=ids, batch_size=8, **shape)
    dense = torch.randint(-2, 3, (8, 2), generator=generator).float()
    return Batch(dense, sparse, (dense[:, 0] > 0).float())


def batches(form: str, count: int, first: int = 0) -> list[Batch]:
    """``count`` batches of fixed hotness, jagged ones, or both in turns."""
    is_jagged = {"fixed": lambda _: False, "jagged": lambda _: True, "mixed": lambda n: n % 7 > 4}
    return [batch(n, is_jagged=is_jagged[form](n)) for n in range(first, first + count)]


def most_rows(of: Iterable[Batch]) -> int:
    """The most distinct rows that a batch uses of the tables of one group."""
    found = 0
    for one in of:
        sparse = one.sparse
        bounds = torch.tensor([0, *itertools.accumulate(h * 8 for h in _HOTNESS)])
        if sparse.offsets is not None:
            bounds = sparse.offsets[::8]
        a, b, c = (sparse.values[i:j] for i, j in itertools.pairwise(bounds.tolist()))
        count = torch.cat([a, c]).unique().numel() + b.unique().numel()
        found = max(found, count)
    return found


def train_by_hand(
    model: StoredRanker,
    of: Sequence[Batch],
    kind: Callable[..., torch.optim.Optimizer] = Adam,
) -> list[float]:
    optimizers = optimizers_of(model, kind)
    return [step_by_hand(model, LOSS, optimizers, one).item() for one in of]


def tables_of(model: nn.Module) -> list[Table]:
    """The tables of all modules of ``model`` that hold some."""
    modules = [m for m in model.modules() if isinstance(m, TableModule)]
    return [table for module in modules for table in module.table_set.tables]


def disk_groups_of(model: nn.Module) -> list[DiskGroup]:
    found = dict.fromkeys(table.group for table in tables_of(model))
    return [group for group in found if isinstance(group, DiskGroup)]


def rows_and_states(model: nn.Module) -> dict[str, Tensor]:
    """The rows of all tables and their optimizer state, by id in dynamic tables."""
    found = {}
    for number, table in enumerate(tables_of(model)):
        chunks = list(row_chunks(table, _CHUNK_BYTES))
        keys = torch.cat([chunk.keys for chunk in chunks])
        order = keys.argsort()
        parts = {"keys": keys, "rows": torch.cat([chunk.rows for chunk in chunks])}
        for name in chunks[0].states:
            parts[name] = torch.cat([chunk.states[name] for chunk in chunks])
        for name, tensor in parts.items():
            found[f"{number}.{table.spec.name}.{name}"] = tensor[order].clone()
    return found


def assert_same_tables(model: nn.Module, expected: nn.Module) -> None:
    """All rows and states of both have equal bits, and so have dense parameters."""
    found, wanted = rows_and_states(model), rows_and_states(expected)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name].to(tensor.device)), name
    pairs = zip(model.named_parameters(), expected.named_parameters(), strict=True)
    for (name, parameter), (_, other) in pairs:
        if not parameter.is_meta:
            assert torch.equal(parameter, other), name
