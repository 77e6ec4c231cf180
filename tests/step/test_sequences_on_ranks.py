"""Sharded models with a vector for each id train in captured steps as in a plain loop, bit for
bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.jagged_sequences import (
    DIM,
    NUM_ROWS,
    NUM_SAMPLES,
    Attention,
    LongAttention,
    Model,
    SegmentMeans,
    by_hand,
    by_pipeline,
    make_batch,
    unpooled,
)
from tests.support.ranks import run_on_ranks

PLACEMENTS = {
    "whole tables": dict.fromkeys(("a", "b", "c", "tags", "history"), "table_wise"),
    "columns": dict.fromkeys(("a", "b", "c", "tags", "history"), "column_wise"),
    "rows": dict.fromkeys(("a", "b", "c", "tags", "history"), "row_wise"),
    "copies": dict.fromkeys(("a", "b", "c", "tags", "history"), "data_parallel"),
    "each": {
        "a": "column_wise",
        "b": "row_wise",
        "c": "table_wise",
        "tags": "data_parallel",
        "history": "row_wise",
    },
}


class OfFixed(Model):
    """Takes features of fixed hotness alone, in one table of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torchembed.EmbeddingCollection(
            [unpooled("a", NUM_ROWS, ("user",)), unpooled("b", NUM_ROWS, ("item", "user"))]
        )
        self.bags = torchembed.EmbeddingBagCollection(
            [
                torchembed.EmbeddingBagConfig(
                    name=name, num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=("user",)
                )
                for name in ("tags", "history")
            ]
        )

    def forward(self, batch: dict[str, Any]) -> Tensor:
        features = batch["fixed"]
        found, again = self.items(features), self.of_fixed(features)
        users = found["user@a"].values().view(NUM_SAMPLES, 2, DIM)
        scores = (users @ found["item"].values().unsqueeze(2)).softmax(1)
        parts = [
            *(self.bags(features).values(), (scores * users).sum(1), again["item"].values()),
            *(again["user"].values().view(NUM_SAMPLES, -1), found["user@b"].values()[:NUM_SAMPLES]),
        ]
        logits = self.after(torch.cat(parts, dim=1))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, batch["labels"])


def without_jagged(batch: dict[str, Any]) -> dict[str, Any]:
    return {"fixed": batch["fixed"], "labels": batch["labels"]}


CONTAINERS = {"a": "items", "b": "items", "c": "of_fixed"}


def sharded(model: Model, placements: dict[str, str]) -> Model:
    plan = {}
    for table, placement in placements.items():
        holder = CONTAINERS.get(table)
        where = "bags.embedding_bags" if holder is None else f"{holder}.embeddings"
        plan[f"{where}.{table}"] = placement
    torchembed.shard_embeddings(model, init_device_mesh("cpu", (2,)), plan=plan)
    return model


def trained(
    kind: type[Model], placements: dict[str, str], times: list[int]
) -> tuple[list[str], list[str]]:
    """The differences from a plain loop on this rank, and the kinds of steps."""
    rank = dist.get_rank()
    batches = [make_batch(2 * seed + rank, n) for seed, n in enumerate(times)]
    if kind is OfFixed:
        batches = [without_jagged(batch) for batch in batches]
    plain, model = sharded(kind(), placements), sharded(kind(), placements)
    expected = by_hand(plain, batches)
    losses, kinds = by_pipeline(model, batches)
    differs = ["losses"] if losses != expected else []
    parameters = zip(plain.named_parameters(), model.parameters(), strict=True)
    differs += [name for (name, one), other in parameters if not torch.equal(one, other)]
    return differs, kinds


def all_trained(runs: list[tuple[type[Model], str, list[int]]]) -> list[Any]:
    return [trained(kind, PLACEMENTS[name], times) for kind, name, times in runs]


RUNS = [
    *((OfFixed, name, [1] * 7) for name in PLACEMENTS),
    *((SegmentMeans, name, [1] * 7) for name in ("rows", "each")),
    (Attention, "each", [1] * 7),
    (LongAttention, "each", [1, 1, 1, 1, 1, 1, 40, 1, 0, 1, 1, 90, 1, 1, 1, 1]),
]


@pytest.fixture(scope="module")
def found() -> list[list[Any]]:
    """For each rank the result of each run."""
    return run_on_ranks(2, all_trained, RUNS)


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_captured_steps_of_sharded_sequences_equal_the_plain_loop(
    number: int, found: list[list[Any]]
) -> None:
    kind, placements, _ = RUNS[number]
    for of_rank in found:
        differs, kinds = of_rank[number]
        assert differs == [], RUNS[number]
        # Ids of divided rows go to one rank each, which their hotness does not say.
        is_graph = kind is OfFixed and placements not in ("rows", "each")
        assert kinds[-1] == ("graph" if is_graph else "padded"), kinds
