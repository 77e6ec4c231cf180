"""Features of fixed hotness beside jagged ones of the same samples are looked up as they are."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchembed
from torchembed.core.features import with_offsets
from torchembed.data.batch import as_batch

NUM_ROWS, DIM, NUM_SAMPLES = 13, 4, 3


def mixed() -> torchembed.MixedFeatures:
    fixed = torchembed.SparseFeatures(
        keys=("user", "item"), values=torch.arange(9), hotness=(2, 1), batch_size=NUM_SAMPLES
    )
    lists: dict[str, Any] = {"seen": [[3, 1], [], [4]], "tags": [[1], [5], []]}
    jagged = torchembed.SparseFeatures.from_dict(lists)
    return torchembed.MixedFeatures((fixed, jagged))


def joined(features: torchembed.MixedFeatures) -> torchembed.SparseFeatures:
    """All features as jagged ones."""
    one, other = map(with_offsets, features.parts)
    assert one.offsets is not None
    assert other.offsets is not None
    return torchembed.SparseFeatures(
        keys=(*one.keys, *other.keys),
        values=torch.cat([one.values, other.values]),
        offsets=torch.cat([one.offsets, other.offsets[1:] + one.offsets[-1]]),
        batch_size=NUM_SAMPLES,
    )


def bags(*keys: str, **settings: Any) -> torchembed.EmbeddingBagCollection:
    configs = [
        torchembed.EmbeddingBagConfig(
            name=f"of_{key}",
            num_embeddings=NUM_ROWS,
            embedding_dim=DIM + number % 2,
            feature_names=(key,),
            pooling=(torchembed.Pooling.SUM, torchembed.Pooling.MEAN)[number // 2],
        )
        for number, key in enumerate(keys)
    ]
    return torchembed.EmbeddingBagCollection(configs, **settings)


def sequences(*keys: str) -> torchembed.EmbeddingCollection:
    config = torchembed.EmbeddingConfig(
        name="a", num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=keys
    )
    return torchembed.EmbeddingCollection([config])


@pytest.mark.parametrize(
    "keys", [("item", "user"), ("tags", "seen"), ("seen",), ("tags", "item", "seen", "user")]
)
def test_pooled_vectors_and_gradients_are_those_of_jagged_features(keys: tuple[str, ...]) -> None:
    collection, other = bags(*keys), bags(*keys)
    found, expected = collection(mixed()), other(joined(mixed()))
    assert found.keys() == expected.keys() == list(keys)
    assert torch.equal(found.values(), expected.values())
    weights = torch.arange(found.values().numel()).view_as(found.values()).float()
    for result in (found, expected):
        (result.values() * weights).sum().backward()
    for one, two in zip(collection.parameters(), other.parameters(), strict=True):
        assert isinstance(one.grad, Tensor)
        assert isinstance(two.grad, Tensor)
        assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("keys", [("item",), ("seen", "user", "tags", "item")])
def test_vectors_of_ids_are_those_of_jagged_features(keys: tuple[str, ...]) -> None:
    collection = sequences(*keys)
    found, expected = collection(mixed()), collection(joined(mixed()))
    assert list(found) == list(expected) == list(keys)
    for key, vectors in found.items():
        assert torch.equal(vectors.values(), expected[key].values())
        assert vectors.offsets().tolist() == expected[key].offsets().tolist()


def test_reserved_columns_come_first() -> None:
    collection = bags("seen", "user")
    expected = collection(mixed()).values()
    collection.reserved_columns = 3
    values = collection(mixed()).values()
    assert torch.equal(values, expected)
    assert values.storage_offset() == 3


def test_changes_of_a_collection_are_those_of_its_parts() -> None:
    collection = bags("seen", "user")
    before = collection(mixed()).values()
    assert len(list(collection.modules())) == 4
    with torch.no_grad():
        for parameter in collection.parameters():
            parameter.mul_(2)
    assert torch.equal(collection(mixed()).values(), before * 2)
    for other in (copy.deepcopy(collection), pickle.loads(pickle.dumps(collection))):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        assert torch.equal(other(mixed()).values(), before * 4)
    assert torch.equal(collection(mixed()).values(), before * 2)
    assert collection.double()(mixed()).values().dtype == before.double().dtype
    assert collection.half()(mixed()).values().dtype == torch.float16


def test_a_bad_id_is_named() -> None:
    features = mixed()
    features.parts[1].values[-1] = 99
    with pytest.raises(IndexError, match=r"table of_tags, feature tags, position 1 .* value 99"):
        bags("user", "tags")(features)


def test_a_fused_optimizer_trains_what_both_parts_look_up() -> None:
    found = []
    for features in (mixed(), joined(mixed())):
        collection = sequences("seen", "user")
        optimizer = torchembed.optim.SGD(collection.parameters(), lr=0.5)
        torch.stack([v.values().sum() for v in collection(features).values()]).sum().backward()
        optimizer.step()
        found.append(collection.state_dict()["embeddings.a.weight"])
    assert torch.equal(*found)


def test_what_is_refused_is_named() -> None:
    fixed, jagged = mixed().parts
    with pytest.raises(ValueError, match=r"parts must have different keys, got \['user', 'item',"):
        torchembed.MixedFeatures((fixed, fixed))
    few = torchembed.SparseFeatures.from_dict({"few": [[1]]})
    with pytest.raises(ValueError, match=r"one number of samples, got \[3, 1\]"):
        torchembed.MixedFeatures((fixed, few))
    with pytest.raises(ValueError, match=r"features must have the keys \['else'\]"):
        bags("user", "else")(mixed())
    with pytest.raises(TypeError, match="got 2 parts with some; make one SparseFeatures"):
        bags("user", "seen").lookup(mixed())
    assert bags("seen", "tags").lookup(mixed()).vectors.values().shape == (3, 2 * DIM + 1)
    assert jagged.keys == ("seen", "tags")


def test_they_move_together() -> None:
    moved = mixed().to("meta")
    assert all(part.values.is_meta for part in moved.parts)
    assert moved.keys == ("user", "item", "seen", "tags")
    assert moved.batch_size == NUM_SAMPLES


def nested(lists: list[list[int]]) -> Tensor:
    return torch.nested.nested_tensor([torch.tensor(ids) for ids in lists], layout=torch.jagged)


def test_a_batch_may_map_features_to_jagged_ids() -> None:
    seen = torchembed.JaggedTensor(torch.tensor([3, 1, 4]), torch.tensor([0, 2, 2, 3]))
    sparse = {"user": torch.arange(6).view(3, 2), "seen": seen, "tags": nested([[1], [5], [2, 7]])}
    batch = as_batch((None, sparse, torch.zeros(3)))
    assert isinstance(batch.sparse, torchembed.MixedFeatures)
    fixed, jagged = batch.sparse.parts
    assert (fixed.keys, fixed.hotness) == (("user",), (2,))
    assert jagged.keys == ("seen", "tags")
    assert jagged.values.tolist() == [3, 1, 4, 1, 5, 2, 7]
    assert jagged.offsets is not None
    assert jagged.offsets.tolist() == [0, 2, 2, 3, 4, 5, 7]
    only = as_batch((None, {"seen": seen}, torch.zeros(3))).sparse
    assert isinstance(only, torchembed.SparseFeatures)
    with pytest.raises(ValueError, match=r"one number of samples, got \{'seen': 3, 'tags': 1\}"):
        as_batch((None, {"seen": seen, "tags": nested([[1]])}, torch.zeros(3)))


def test_a_collection_is_a_module_as_before() -> None:
    model = nn.ModuleDict({"bags": bags("user", "seen")})
    names = list(dict(model.named_parameters()))
    model["bags"](mixed())
    assert list(dict(model.named_parameters())) == names
    assert list(model.state_dict()) == names
