"""Back to modules of torch."""

from typing import Any

import pytest
import torch
from torch import nn

import torchembed
from tests.support.three_tables import NAMES, TABLES, features
from tests.support.tolerance import assert_same_bits
from torchembed import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig, Pooling

IDS = torch.tensor([[0, 3, 3], [3, 4, 0]])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mode": "sum", "sparse": True, "padding_idx": -2},
        {"mode": "max", "include_last_offset": True, "dtype": torch.float64},
    ],
)
def test_a_bag(settings: dict[str, Any], device: torch.device) -> None:
    ours = torchembed.EmbeddingBag(5, 4, device=device, **settings).eval()
    theirs = ours.to_torch()
    assert type(theirs) is nn.EmbeddingBag
    expected = nn.EmbeddingBag(5, 4, device=device, **settings)
    assert repr(theirs) == repr(expected)
    assert theirs.include_last_offset == expected.include_last_offset
    assert not theirs.training and theirs.weight.requires_grad
    found = [module(IDS.to(device)).detach() for module in (ours, theirs)]
    eps = torch.finfo(found[0].dtype).eps
    torch.testing.assert_close(*found, rtol=0, atol=3 * eps * found[0].abs().max().item())
    with torch.no_grad():
        theirs.weight.zero_()
    assert ours.weight.count_nonzero() > 0


def test_an_embedding(device: torch.device) -> None:
    ours = torchembed.Embedding(5, 4, padding_idx=1, sparse=True, device=device)
    ours.weight.requires_grad_(False)
    theirs = ours.to_torch()
    assert type(theirs) is nn.Embedding
    assert repr(theirs) == repr(nn.Embedding(5, 4, padding_idx=1, sparse=True))
    assert not theirs.weight.requires_grad
    assert_same_bits(theirs(IDS.to(device)), ours(IDS.to(device)))


def test_collections(device: torch.device) -> None:
    pooled = EmbeddingBagCollection(TABLES, device=device, sparse=True)
    bags = pooled.to_torch()
    assert list(bags) == list(NAMES)
    batch = features(device)
    offsets = torch.tensor([0, 1, 2], device=device)
    vectors = pooled(batch).to_dict()
    for name, bag in bags.items():
        assert type(bag) is nn.EmbeddingBag and bag.include_last_offset and bag.sparse
        assert bag.mode == Pooling.SUM.value
        assert_same_bits(bag(torch.tensor([0, 2], device=device), offsets), vectors[name])
    tables = [
        EmbeddingConfig(name=name, num_embeddings=5, embedding_dim=4, feature_names=(name,))
        for name in NAMES
    ]
    sequences = EmbeddingCollection(tables, device=device)
    found = sequences(batch)
    for name, embedding in sequences.to_torch().items():
        assert type(embedding) is nn.Embedding and not embedding.sparse
        assert_same_bits(embedding(torch.tensor([0, 2], device=device)), found[name].values())
