"""A collection of three tables in one group, and what holds of it at all times."""

import dataclasses

import torch
from torch import nn

from tests.support.tolerance import assert_same_bits
from torchembed import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from torchembed.tables import table_of

NAMES = ("a", "b", "c")
TABLES = [
    EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=(name,))
    for name, rows in zip(NAMES, (3, 5, 4), strict=True)
]


def make(
    device: torch.device | str, dtype: torch.dtype = torch.float32, seed: int = 0
) -> EmbeddingBagCollection:
    tables = [dataclasses.replace(table, dtype=dtype) for table in TABLES]
    return EmbeddingBagCollection(tables, device=device, seed=seed)


def features(device: torch.device) -> SparseFeatures:
    """Rows 0 and 2 of every table."""
    values = torch.tensor([0, 2] * 3, device=device)
    return SparseFeatures(keys=NAMES, values=values, batch_size=2, hotness=(1, 1, 1))


def weights(module: EmbeddingBagCollection) -> list[nn.Parameter]:
    return list(module.parameters())


def train(module: EmbeddingBagCollection) -> None:
    """Backward of the sum: a gradient of ones for the rows that are looked up."""
    device = next(module.parameters()).device
    module(features(device)).values().sum().backward()


def assert_in_groups(module: EmbeddingBagCollection) -> None:
    """Every parameter is its part of a group's weight, and a lookup reads it."""
    table_set = module._table_set
    for group in table_set.current_groups():
        for table in group.tables:
            assert table.group is group and table.owner is table_set
            assert table_of(table.parameter) is table
            rows = group.table_rows(group.weight, table)
            assert table.parameter.data_ptr() == rows.data_ptr()
            assert_same_bits(table.parameter, rows)
    for table, parameter in zip(module._tables, weights(module), strict=True):
        assert table.parameter is parameter
    found = module(features(module.device)).values()
    expected = torch.cat([parameter[[0, 2]] for parameter in weights(module)], dim=1)
    assert_same_bits(found, expected.to(found.dtype))
