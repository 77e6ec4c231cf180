"""Errors of ``EmbeddingBagCollection``, and what it prints, word by word."""

import dataclasses

import pytest
import torch

from tests.support.clicks import import_torchrec, random_clicks
from torchembed import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, SparseFeatures

TABLES = [
    EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=feature_names)
    for name, rows, feature_names in (
        ("users", 13, ("user",)),
        ("goods", 29, ("item", "history")),
        ("genres", 9, ("genre",)),
        ("tags", 5, ("tag",)),
    )
]


def test_errors_of_the_batch() -> None:
    module = EmbeddingBagCollection(TABLES)
    clicks = random_clicks({"user": 13, "item": 9, "history": 29, "genre": 9, "tag": 5}, 2)
    cpu = torch.device("cpu")
    with pytest.raises(
        ValueError, match=r"features must have the keys \['genre', 'tag'\], got \['"
    ):
        module(clicks.reordered(["user", "item", "history"]).jagged(cpu))
    weighted = EmbeddingBagCollection(TABLES, is_weighted=True)
    with pytest.raises(ValueError, match="features must have weights, since is_weighted is set"):
        weighted(clicks.jagged(cpu))
    with pytest.raises(TypeError, match=r"features must be SparseFeatures or a Keyed.*has no keys"):
        module(torch.zeros(2))
    features = clicks.jagged(cpu)
    assert features.offsets is not None
    for offsets, message in (
        (features.offsets + 1, "offsets must start at 0"),
        (features.offsets.flip(0), r"offsets must not decrease, got \d+ and \d+ at positions 0"),
    ):
        with pytest.raises(ValueError, match=message):
            module(dataclasses.replace(features, offsets=offsets))


def test_tables_are_a_list() -> None:
    for tables, given in ((TABLES[0], "EmbeddingBagConfig"), ({"users": TABLES[0]}, "dict")):
        with pytest.raises(TypeError, match=f"tables must be a list of configs, got {given}"):
            EmbeddingBagCollection(tables)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tables must hold at least one config, got none"):
        EmbeddingBagCollection([])


def test_what_is_printed() -> None:
    module = EmbeddingBagCollection(TABLES[:1])
    assert "(users): TableWeight(13, 4)" in repr(module)
    pooled = module(SparseFeatures.from_dict({"user": [[0], []]}))
    assert repr(pooled) == f"KeyedTensor(keys=['user'], values={pooled.values()})"
    ids = JaggedTensor(torch.tensor([3, 9]), torch.tensor([0, 2]))
    assert repr(ids) == "JaggedTensor(values=tensor([3, 9]), offsets=tensor([0, 2]))"


def test_errors_of_torchrecs_batches() -> None:
    torchrec = import_torchrec()
    module = EmbeddingBagCollection(TABLES[:1])
    variable = torchrec.KeyedJaggedTensor(
        keys=["user"],
        values=torch.tensor([1]),
        lengths=torch.tensor([1]),
        stride_per_key_per_rank=[[1]],
        inverse_indices=(["user"], torch.tensor([[0]])),
    )
    with pytest.raises(ValueError, match="features must have one batch size for all keys"):
        module(variable)
    inverse = torchrec.KeyedJaggedTensor(
        keys=["user"],
        values=torch.tensor([1]),
        lengths=torch.tensor([1]),
        inverse_indices=(["user"], torch.tensor([[0]])),
    )
    with pytest.raises(ValueError, match="features must not have inverse_indices"):
        module(inverse)


def test_errors_of_the_tables() -> None:
    with pytest.raises(ValueError, match=r"tables must have different names, got \['users'\] more"):
        EmbeddingBagCollection([TABLES[0], TABLES[0]])
    with pytest.raises(ValueError, match="tables must hold at least one config, got none"):
        EmbeddingBagCollection([])
    with pytest.raises(ValueError, match='on_bad_id must be "raise"'):
        EmbeddingBagCollection(TABLES, on_bad_id="skip")
