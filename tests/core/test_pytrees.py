"""Batches and results as PyTorch's trees."""

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.support.three_tables import NAMES, features, make
from tests.support.tolerance import assert_same_bits
from torchembed import JaggedTensor, KeyedTensor, SparseFeatures


def test_a_tree_is_taken_apart_and_made_again() -> None:
    batch = SparseFeatures.from_dict({"user": [7, 2], "genre": [[1, 2], []]})
    leaves, spec = pytree.tree_flatten({"batch": batch})
    assert [leaf is None for leaf in leaves] == [False, False, True]
    made = pytree.tree_unflatten(leaves, spec)["batch"]
    assert made.values is batch.values and made.offsets is batch.offsets
    assert made == batch
    shapes = pytree.tree_map_only(Tensor, lambda tensor: tuple(tensor.shape), batch)
    assert shapes.values == (4,)  # no tensor, and no check of one
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    assert paths == [".values", ".offsets", ".weights"]


def test_results_are_trees() -> None:
    keyed = KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3))
    doubled = pytree.tree_map(lambda tensor: 2 * tensor, keyed)
    assert doubled.keys() == ["a", "b"] and doubled["b"].tolist() == [[2, 4], [8, 10]]
    jagged = JaggedTensor(torch.arange(3), torch.tensor([0, 1, 3]))
    assert pytree.tree_map(torch.clone, jagged).lengths().tolist() == [1, 2]


def test_a_collection_is_exported_with_its_own_batches(device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = make(device)

        def forward(self, batch: SparseFeatures) -> KeyedTensor:
            return self.tables(batch)

    model = Model()
    exported = torch.export.export(model, (features(device),)).module()
    other = features(device)
    other = SparseFeatures(keys=NAMES, values=other.values + 0, batch_size=2, hotness=(1, 1, 1))
    other.values[0] = 1
    found, expected = exported(other), model(other)
    assert found.keys() == expected.keys()
    assert_same_bits(found.values(), expected.values())
