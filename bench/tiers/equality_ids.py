"""A small model over two tables, and batches whose distinct rows of each table are known."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bench.data.workload import EXPONENTS
from torchembed import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from torchembed.data import Batch
from torchembed.data.skewed_ids import skewed_ids
from torchembed.tables import Storage

NUM_ROWS = 1000
"""Rows of each table."""
DIMS = {"item": 4, "user": 8}
"""Columns of each table; as they differ, each table has a cache of its own."""
NUM_IDS = {"item": (1, 2), "user": (2,)}
"""Ids a bag of each of a table's features."""
BATCH_SIZE = 16
FIXED_ROWS = 24
"""Distinct rows of each table in a batch of :func:`turnover_batch`."""
_NUM_DENSE = 2
_KEYS = tuple(f"{table}_{n}" for table, counts in NUM_IDS.items() for n in range(len(counts)))


class Ranker(nn.Module):
    """A logit from dense features and the pooled vectors of both tables.

    Args:
        storages: of each table, by its name; None for the device.
        device: of the dense part, and of the tables' caches.
    """

    def __init__(self, storages: Mapping[str, Storage | None], device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=NUM_ROWS,
                    embedding_dim=dim,
                    feature_names=tuple(f"{name}_{n}" for n in range(len(NUM_IDS[name]))),
                    storage=storages[name],
                )
                for name, dim in DIMS.items()
            ],
            device=device,
        )
        width = _NUM_DENSE + sum(dim * len(NUM_IDS[name]) for name, dim in DIMS.items())
        self.dense = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return self.dense(torch.cat([dense, self.tables(sparse).values()], dim=1))


def zipf_batch(number: int) -> Batch:
    """A batch of Zipf ids of exponent 1.05, with the hot ids scattered over each table."""
    count = {table: BATCH_SIZE * sum(counts) for table, counts in NUM_IDS.items()}
    drawn = [
        skewed_ids(NUM_ROWS, n, exponent=EXPONENTS["zipf"], seed=seed, first=number * n)
        for seed, n in enumerate(count.values())
    ]
    return _batch(drawn, number)


def turnover_batch(number: int, num_more: int = 0) -> Batch:
    """A batch of exactly ``FIXED_ROWS + num_more`` distinct rows of each table, some of them twice
    or more, and none of them in the batch before."""
    num_rows = FIXED_ROWS + num_more
    generator = torch.Generator().manual_seed(number)
    drawn = []
    for counts in NUM_IDS.values():
        num_ids = BATCH_SIZE * sum(counts)
        places = torch.arange(num_ids)[torch.randperm(num_ids, generator=generator)] % num_rows
        drawn.append((number * FIXED_ROWS + places) % NUM_ROWS)
    return _batch(drawn, number)


def most_rows(batches: Sequence[Batch]) -> dict[str, int]:
    """The most distinct rows of each table that one of ``batches`` uses, by the table's name."""
    sizes = [BATCH_SIZE * sum(counts) for counts in NUM_IDS.values()]
    parts = [batch.sparse.values.split(sizes) for batch in batches]
    most = [max(len(ids.unique()) for ids in of_table) for of_table in zip(*parts, strict=True)]
    return dict(zip(NUM_IDS, most, strict=True))


def _batch(drawn: Sequence[Tensor], number: int) -> Batch:
    """Of the ids of each table."""
    generator = torch.Generator().manual_seed(number)
    hotness = tuple(count for counts in NUM_IDS.values() for count in counts)
    sparse = SparseFeatures(
        keys=_KEYS, values=torch.cat(list(drawn)), batch_size=BATCH_SIZE, hotness=hotness
    )
    dense = torch.randint(-2, 3, (BATCH_SIZE, _NUM_DENSE), generator=generator).float()
    return Batch(dense, sparse, (dense[:, 0] > 0).float())
