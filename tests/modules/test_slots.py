"""Picking features of a batch, and the groups that look them up."""

import dataclasses

import pytest
import torch
from torch import Tensor

import torchembed
from tests.support.clicks import Clicks, random_clicks
from torchembed import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from torchembed.modules.lookup.feature_selection import select_features

NUM_IDS = {"a": 50, "b": 50, "c": 50, "d": 50}
HOTNESS = {"a": 2, "b": 0, "c": 1, "d": 3}


def bags(features: SparseFeatures) -> list[list[list[int]]]:
    """``[feature][sample]`` of ids."""
    lengths = (
        [count for count in features.hotness for _ in range(features.batch_size)]
        if features.hotness is not None
        else features.offsets.diff().tolist()  # type: ignore[union-attr]
    )
    # On a GPU picked features keep spare ids at their end.
    held = features.values[: sum(lengths)]
    parts = [part.tolist() for part in held.split([*lengths, 0])][: len(lengths)]
    size = features.batch_size
    return [parts[f * size : (f + 1) * size] for f in range(len(features.keys))]


@pytest.mark.parametrize("form", ["jagged", "fixed"])
@pytest.mark.parametrize("indices", [[2, 0], [3], [1, 1, 1], [], [0, 1, 2, 3, 0]])
@pytest.mark.parametrize("batch_size", [4, 1])
def test_features_are_picked_in_order(
    batch_size: int, indices: list[int], form: str, device: torch.device
) -> None:
    clicks = random_clicks(NUM_IDS, batch_size, hotness=HOTNESS if form == "fixed" else None)
    features = getattr(clicks, form)(device, clicks.flat_weights().to(device), torch.int32)
    picked = select_features(features, indices)
    assert len(picked.keys) == len(indices)
    assert picked.batch_size == batch_size
    assert bags(picked) == [clicks.bags[clicks.keys[i]] for i in indices]
    weights: list[Tensor] = [
        torch.tensor(bag) for i in indices for bag in clicks.weights[clicks.keys[i]]
    ]
    assert picked.weights is not None and picked.values.dtype == torch.int32
    expected = torch.cat(weights).tolist() if weights else []
    assert picked.weights[: len(expected)].tolist() == expected


@pytest.mark.parametrize("form", ["jagged", "fixed"])
def test_all_features_in_order_are_the_batch_itself(form: str, device: torch.device) -> None:
    clicks = random_clicks(NUM_IDS, 3, hotness=HOTNESS)
    features = getattr(clicks, form)(device)
    assert select_features(features, range(4)) is features


def test_features_of_no_samples(device: torch.device) -> None:
    features = Clicks({name: [] for name in NUM_IDS}, {}).jagged(device)
    picked = select_features(features, [1, 0])
    assert (picked.batch_size, picked.values.numel()) == (0, 0)
    assert picked.offsets is not None and picked.offsets.tolist() == [0]


def test_weights_keep_their_gradient(device: torch.device) -> None:
    clicks = random_clicks(NUM_IDS, 3)
    weights = clicks.flat_weights().to(device).requires_grad_()
    picked = select_features(clicks.jagged(device, weights), [2, 2, 0])
    assert picked.weights is not None
    picked.weights.sum().backward()
    uses = {"a": 1.0, "b": 0.0, "c": 2.0, "d": 0.0}
    expected = [uses[name] for name in clicks.keys for bag in clicks.bags[name] for _ in bag]
    assert weights.grad is not None
    assert weights.grad.tolist() == expected


TABLES = [
    EmbeddingBagConfig(name=name, num_embeddings=4, embedding_dim=2, feature_names=(name,))
    for name in NUM_IDS
]


def groups(module: EmbeddingBagCollection) -> list[list[int]]:
    """The slots of each lookup."""
    return [entry.slots for entry in module._slots.by_group()]


def test_one_lookup_for_all_tables_that_are_alike() -> None:
    assert groups(EmbeddingBagCollection(TABLES)) == [[0, 1, 2, 3]]


def test_lookups_follow_the_groups() -> None:
    module = EmbeddingBagCollection([*TABLES[:3], dataclasses.replace(TABLES[3], embedding_dim=3)])
    assert groups(module) == [[0, 1, 2], [3]]
    weights = [module.embedding_bags[name].weight for name in NUM_IDS]
    weights[1].requires_grad_(False)
    assert groups(module) == [[0, 2], [1], [3]]
    optimizer = torchembed.optim.SGD([{"params": [weights[0]], "lr": 1.0}, {"params": weights[2]}])
    assert groups(module) == [[0], [1], [2], [3]]
    torchembed.optim.SGD(weights)
    weights[1].requires_grad_(True)
    assert groups(module) == [[0, 1, 2], [3]]
    assert len(optimizer.param_groups) == 2


def test_lookups_keep_their_groups_between_calls() -> None:
    module = EmbeddingBagCollection(TABLES)
    assert module._slots.by_group() is module._slots.by_group()
