"""``lookup``: vectors and bad ids, from several threads at once, and nothing is changed."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import torchembed
from tests.support.row_indices import RecordingBagConfig, RecordingIndex
from torchembed import SparseFeatures
from torchembed.tables import table_of

NUM_THREADS = 4


def configs(kind: Any) -> list[Any]:
    return [
        kind(name="small", num_embeddings=5, embedding_dim=4, feature_names=("a", "b")),
        kind(name="large", num_embeddings=9, embedding_dim=4, feature_names=("a",)),
        kind(name="wide", num_embeddings=9, embedding_dim=8, feature_names=("b",)),
    ]


def make_module(name: str, device: torch.device, **settings: Any) -> Any:
    if name == "EmbeddingBagCollection":
        kind = torchembed.EmbeddingBagConfig
        return torchembed.EmbeddingBagCollection(configs(kind), device=device, **settings)
    if name == "EmbeddingCollection":
        kind = torchembed.EmbeddingConfig
        return torchembed.EmbeddingCollection(configs(kind), device=device, **settings)
    return getattr(torchembed, name)(9, 4, padding_idx=2, device=device, seed=0, **settings)


def make_input(name: str, seed: int, device: torch.device) -> Any:
    ids = torch.randint(5, (6, 3), generator=torch.Generator().manual_seed(seed)).to(device)
    if "Collection" not in name:
        return ids
    offsets = torch.tensor([0, 2, 2, 5, 9, 10, 16], device=device)
    return SparseFeatures(
        keys=("b", "unused", "a"), values=ids.flatten(), batch_size=2, offsets=offsets
    )


def tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        return [t for jagged in result.values() for t in (jagged.values(), jagged.offsets())]
    return [result.values()]


NAMES = ("EmbeddingBagCollection", "EmbeddingCollection", "EmbeddingBag", "Embedding")


@pytest.mark.parametrize("name", NAMES)
def test_threads_look_up_at_once(name: str, device: torch.device) -> None:
    module = make_module(name, device)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.5)
    inputs = [make_input(name, seed, device) for seed in range(NUM_THREADS)]
    twin = make_module(name, device)
    expected = [tensors_of(twin(given)) for given in inputs]
    before = {key: value.clone() for key, value in module.state_dict().items()}
    barrier = threading.Barrier(NUM_THREADS)

    def look_up(given: Any) -> list[Tensor]:
        barrier.wait()
        results = [module.lookup(given) for _ in range(20)]
        assert not any(bad_ids.is_bad.any() or bad_ids.num_bad.any() for _, bad_ids in results)
        return tensors_of(results[-1].vectors)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        found = list(threads.map(look_up, inputs))
    for of_thread, of_forward in zip(found, expected, strict=True):
        for tensor, like in zip(of_thread, of_forward, strict=True):
            assert torch.equal(tensor, like)
            assert not tensor.requires_grad
    optimizer.step()
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])
    for parameter in module.parameters():
        table = table_of(parameter)
        assert table is not None
        assert not table.group.pending


@pytest.mark.parametrize("on_bad_id", ["raise", "zero", "clamp"])
@pytest.mark.parametrize("name", NAMES)
def test_bad_ids_are_returned(name: str, on_bad_id: str, device: torch.device) -> None:
    """Ids 5 and more are outside the table of 5 rows, which features a and b use."""
    module = make_module(name, device, on_bad_id=on_bad_id)
    given = make_input(name, 0, device)
    ids = (given if isinstance(given, Tensor) else given.values).view(-1)
    bad = {0: 5, 7: 99, 11: -1, 17: 99}
    for position, value in bad.items():
        ids[position] = value
    vectors, (keys, is_bad, num_bad) = module.lookup(given)
    if "Collection" in name:
        assert keys == ("b", "unused", "a")
        # Position 7 is of the feature that no table uses, 17 of no bag.
        assert is_bad.nonzero().flatten().tolist() == [0, 11]
        assert num_bad.tolist() == [1, 0, 1]
    else:
        assert keys == ("input",)
        assert is_bad.nonzero().flatten().tolist() == [7, 11, 17]
        assert num_bad.tolist() == [3]
    # Nothing is left for a later call to raise.
    module.check_ids()
    policy = "clamp" if on_bad_id == "clamp" else "zero"
    expected = tensors_of(make_module(name, device, on_bad_id=policy)(given))
    for tensor, like in zip(tensors_of(vectors), expected, strict=True):
        assert torch.equal(tensor, like)


def test_a_lookup_admits_nothing() -> None:
    config = RecordingBagConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=("f",))
    module = torchembed.EmbeddingBagCollection([config])
    features = SparseFeatures.from_dict({"f": [1, 2]})
    module.lookup(features)
    (group,) = module.table_set.current_groups()
    assert isinstance(group.index, RecordingIndex)
    assert not group.index.admissions
    module(features)
    assert len(group.index.admissions) == 1
