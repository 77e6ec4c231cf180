"""A model of features of fixed hotness and one of any length, which it looks up in two ways."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed

NUM_ROWS, DIM, NUM_SAMPLES, LONGEST = 29, 4, 8, 6
FIXED = tuple(f"f{number}" for number in range(5))


def make_batch(seed: int) -> dict[str, Any]:
    """Two ids of each fixed feature, a history of any length, labels."""
    generator = torch.Generator().manual_seed(seed)
    count = 2 * len(FIXED) * NUM_SAMPLES
    fixed = torchembed.SparseFeatures(
        keys=FIXED,
        values=torch.randint(NUM_ROWS, (count,), generator=generator),
        hotness=(2,) * len(FIXED),
        batch_size=NUM_SAMPLES,
    )
    lengths = torch.randint(LONGEST + 1, (NUM_SAMPLES,), generator=generator)
    history = torchembed.SparseFeatures(
        keys=("history",),
        values=torch.randint(NUM_ROWS, (int(lengths.sum()),), generator=generator),
        offsets=F.pad(lengths.cumsum(0), (1, 0)),
        batch_size=NUM_SAMPLES,
    )
    labels = torch.randint(2, (NUM_SAMPLES,), generator=generator).float()
    return {"ids": torchembed.MixedFeatures((fixed, history)), "labels": labels}


def bag_config(key: str) -> torchembed.EmbeddingBagConfig:
    return torchembed.EmbeddingBagConfig(
        name=f"of_{key}", num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=(key,)
    )


class MixedModel(nn.Module):
    """Looks all features up from one batch of them: some pooled, some not, some both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = torchembed.EmbeddingBagCollection(
            [bag_config(key) for key in ("history", *FIXED[1:])]
        )
        self.items = torchembed.EmbeddingCollection(
            [
                torchembed.EmbeddingConfig(
                    name="item",
                    num_embeddings=NUM_ROWS,
                    embedding_dim=DIM,
                    feature_names=("history", FIXED[0]),
                )
            ]
        )
        self.deep = nn.Linear((2 + len(FIXED)) * DIM, 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        found, pooled = self.items(batch["ids"]), self.bags(batch["ids"]).values()
        history = found["history"]
        means = torch.segment_reduce(history.values(), "mean", offsets=history.offsets(), initial=0)
        target = found[FIXED[0]].values().view(NUM_SAMPLES, 2, DIM).sum(1)
        logits = self.deep(torch.cat([pooled, target, target * means], dim=1))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, batch["labels"])
