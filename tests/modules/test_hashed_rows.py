"""Ids of dynamic tables without a row of their own share rows by a hash of the id."""

from typing import Any

import pytest
import torch
from torch import Tensor

import torchembed
from torchembed import LFU, Dynamic, EmbeddingBag, HashedRows, MinimumCount, SparseFeatures
from torchembed.core.random_bits import signed64

NEVER = MinimumCount(2**31 - 1)
"""Gives no id a row of its own."""
NUM_SHARED = 5
IDS = torch.tensor([[signed64(n * 0x9E3779B97F4A7C15), n] for n in range(40)])


def sharing_bag(mode: str = "sum", **policies: Any) -> EmbeddingBag:
    dynamic = Dynamic(missing=HashedRows(NUM_SHARED), **policies)
    return EmbeddingBag(8, 4, mode=mode, seed=3, padding_idx=7, dynamic=dynamic)


def places_of(bag: EmbeddingBag, ids: Tensor) -> Tensor:
    """The shared row that each of ``ids`` reads in a table that was not trained, int64."""
    with torch.no_grad():
        vectors = bag(ids.reshape(-1, 1))
    is_equal = (vectors[:, None] == bag.weight[-NUM_SHARED:]).all(2)
    assert (is_equal.sum(1) == 1).all()
    return is_equal.long().argmax(1).reshape(ids.shape)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_ids_train_as_those_of_a_static_table_modulo_their_hash(mode: str) -> None:
    bag = sharing_bag(mode, admission=NEVER)
    is_padding = IDS == 7
    places = places_of(bag, IDS.masked_fill(is_padding, 1))
    assert len(places.unique()) == NUM_SHARED
    static = EmbeddingBag(NUM_SHARED + 1, 4, mode=mode, padding_idx=NUM_SHARED)
    with torch.no_grad():
        static.weight[:-1] = bag.weight[-NUM_SHARED:]
    places = places.masked_fill(is_padding, NUM_SHARED)
    optimizers = [torchembed.optim.Adagrad(m.parameters(), lr=0.1) for m in (bag, static)]
    for step in range(4):
        part = slice(5 * step, 5 * step + 20)
        outputs = bag(IDS[part]), static(places[part])
        assert torch.equal(*outputs)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            output.square().sum().backward()
            optimizer.step()
    assert torch.equal(bag.weight[-NUM_SHARED:], static.weight[:-1])
    assert bag.statistics(wait=True)["weight"].size == 0


def test_only_ids_without_a_row_share_one() -> None:
    bag = sharing_bag(eviction=LFU())
    optimizer = torchembed.optim.Adagrad(bag.parameters(), lr=0.1)
    hot = torch.arange(100, 108)
    for ids in (hot.repeat(1, 3), torch.tensor([[55]])):
        before = bag.weight.detach().clone()
        bag(ids).square().sum().backward()
        optimizer.step()
    has_changed = (bag.weight != before).any(1)
    statistics = bag.statistics(wait=True)["weight"]
    assert (statistics.size, statistics.capacity, statistics.refused) == (8, 8, 1)
    assert statistics.load_factor == 1
    # The one that was refused trained one shared row, and reads it in evaluation.
    assert has_changed.nonzero().flatten().tolist() == [8 + int(has_changed[8:].nonzero())]
    bag.eval()
    assert torch.equal(bag(torch.tensor([[55]])), bag.weight[has_changed])
    restored = sharing_bag(eviction=LFU()).eval()
    restored.load_state_dict(bag.state_dict())
    ids = torch.tensor([[55, 101], [-1, 2**63 - 1]])
    assert torch.equal(restored(ids), bag(ids))


def test_initial_rows_are_those_of_the_seed_and_differ() -> None:
    first, second = sharing_bag(admission=NEVER), sharing_bag(admission=NEVER)
    assert torch.equal(first.weight[-NUM_SHARED:], second.weight[-NUM_SHARED:])
    assert len(first.weight[-NUM_SHARED:].unique(dim=0)) == NUM_SHARED


def test_tables_of_one_group_have_rows_of_their_own() -> None:
    tables = torchembed.EmbeddingBagCollection(
        [
            torchembed.EmbeddingBagConfig(
                name=name,
                num_embeddings=6,
                embedding_dim=4,
                feature_names=(name,),
                dynamic=Dynamic(admission=NEVER, missing=HashedRows(NUM_SHARED)),
            )
            for name in ("a", "b")
        ]
    )
    optimizer = torchembed.optim.SGD(tables.parameters(), lr=0.5)
    weights = [tables.embedding_bags[name].weight for name in ("a", "b")]
    before = [weight.detach().clone() for weight in weights]
    tables(SparseFeatures.from_dict({"a": [[11]], "b": [[]]})).values().sum().backward()
    optimizer.step()
    assert (weights[0] != before[0]).any(1).sum() == 1
    assert torch.equal(weights[1], before[1])
    # The gradient of each element is 1.
    changed = (weights[0] != before[0]).any(1)
    assert torch.equal(weights[0][changed], before[0][changed] - 0.5)


def test_deltas_bring_all_of_them() -> None:
    bag = sharing_bag(admission=NEVER, deletion_log=1)
    optimizer = torchembed.optim.SGD(bag.parameters(), lr=0.5)
    mark = bag.delta().mark
    bag(IDS).square().sum().backward()
    optimizer.step()
    delta = bag.delta(since=mark).tables["weight"]
    trained = bag.weight[-NUM_SHARED:].clone()
    bag(IDS).square().sum().backward()
    optimizer.step()
    assert torch.equal(delta.shared_rows, trained)
    assert len(delta.ids) == 0
    without = EmbeddingBag(8, 4, mode="sum", dynamic=Dynamic(deletion_log=1))
    assert without.delta().tables["weight"].shared_rows.shape == (0, 4)


@pytest.mark.parametrize(
    ("num_rows", "error", "text"),
    [
        (0, ValueError, "num_rows must be from 1 to 2147483647, got 0"),
        (2**31, ValueError, "num_rows must be from 1"),
        (1.5, TypeError, "num_rows must be an int, got 1.5"),
        (True, TypeError, "num_rows must be an int, got True"),
    ],
)
def test_bad_numbers_of_rows_are_refused(num_rows: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        HashedRows(num_rows)
