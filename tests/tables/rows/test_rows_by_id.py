"""Streams of rows of dynamic tables: whatever comes out by id goes in by id."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import torchembed
from torchembed import (
    LFU,
    Dynamic,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Normal,
    SparseFeatures,
)
from torchembed.checkpoints.exports.whole_model import import_tables
from torchembed.tables import RowChunk, Table, row_chunks, write_rows

MAX_BYTES = 200
POLICIES = {"lru": Dynamic(), "lfu": Dynamic(eviction=LFU())}


def bags(
    capacity: int, dynamic: Dynamic | None, dtype: torch.dtype = torch.float32
) -> EmbeddingBagCollection:
    """Table ``t`` behind another one in its group."""
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=size,
            embedding_dim=3,
            feature_names=(name,),
            dynamic=dynamic,
            dtype=dtype,
            initializer=Normal(std=0.25),
        )
        for name, size in (("other", 5), ("t", capacity))
    ]
    return EmbeddingBagCollection(configs)


def table_of(module: EmbeddingBagCollection) -> Table:
    return module.table_set.tables[1]


def train(module: EmbeddingBagCollection, optimizer: Any, ids: list[int]) -> Tensor:
    optimizer.zero_grad()
    features = SparseFeatures(
        keys=("other", "t"), values=torch.tensor([1, *ids]), batch_size=1, hotness=(1, len(ids))
    )
    loss = module(features).values().float().square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def as_dict(table: Table) -> dict[int, tuple[Any, ...]]:
    found = {}
    for chunk in row_chunks(table, MAX_BYTES):
        assert chunk.scores is not None
        assert chunk.touched is not None
        states = [state.tolist() for state in chunk.states.values()]
        parts = chunk.keys, chunk.rows.tolist(), chunk.scores, chunk.touched, *states
        for row_id, *of_id in zip(*parts, strict=True):
            assert int(row_id) not in found
            found[int(row_id)] = tuple(
                part.item() if isinstance(part, Tensor) else part for part in of_id
            )
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_move_to_another_table_train_on_as_they_would(
    policy: str, dtype: torch.dtype
) -> None:
    """Ids, rows, optimizer states, scores and last uses, into a table of another capacity."""
    module, moved = bags(40, POLICIES[policy], dtype), bags(300, POLICIES[policy], dtype)
    optimizers = [torchembed.optim.Adam(m.parameters(), lr=0.1) for m in (module, moved)]
    for step in range(6):
        train(module, optimizers[0], [step, -step, 2**63 - 1 - step, 3, 3])
    before = as_dict(table_of(module))
    assert len(before) == 17
    moves = [copy.deepcopy(chunk) for chunk in row_chunks(table_of(module), MAX_BYTES)]
    assert len(moves) > 1
    for chunk in moves:
        assert write_rows(table_of(moved), chunk) == 0
    assert as_dict(table_of(moved)) == before
    for chunk in moves:  # again: what is there is written over
        assert write_rows(table_of(moved), chunk) == 0
    assert as_dict(table_of(moved)) == before
    step = module.table_set.tables[0].group.step
    moved.table_set.tables[0].group.step.copy_(step)
    write_rows(moved.table_set.tables[0], next(row_chunks(module.table_set.tables[0], 1 << 20)))
    for ids in ([3, -2, 77], [77, 3], [0]):
        assert train(module, optimizers[0], ids) == train(moved, optimizers[1], ids)


def test_a_smaller_table_keeps_the_rows_of_the_greatest_scores() -> None:
    ids = torch.arange(100)
    scores = (ids * 37) % 100 + 1
    for dynamic in POLICIES.values():
        table = table_of(bags(10, dynamic))
        order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
        left = 0
        for part in order.split(30):
            rows = part[:, None].expand(-1, 3).float()
            left += write_rows(table, RowChunk(ids[part], rows, {}, scores=scores[part]))
        kept = as_dict(table)
        assert set(kept) == set(scores.topk(10).indices.tolist())
        assert all(of_id[0] == [float(row_id)] * 3 for row_id, of_id in kept.items())
        assert left == 90


def test_static_tables_become_dynamic_and_back() -> None:
    static, dynamic, again = bags(20, None), bags(20, Dynamic()), bags(20, None)
    with torch.no_grad():
        table_of(again).parameter.zero_()
    for chunk in row_chunks(table_of(static), MAX_BYTES):
        assert write_rows(table_of(dynamic), chunk) == 0
    for chunk in row_chunks(table_of(dynamic), MAX_BYTES):
        assert write_rows(table_of(again), chunk) == 0
    assert torch.equal(table_of(again).parameter, table_of(static).parameter)


def test_a_chunk_that_does_not_fit_changes_nothing() -> None:
    table = table_of(bags(20, Dynamic()))
    ids = torch.tensor([1, 2])
    for chunk, message in (
        (RowChunk(ids, torch.zeros(2, 4), {}), r"rows must have shape \(2, 3\)"),
        (RowChunk(ids, torch.zeros(2, 3), {"sum": torch.zeros(2)}), "states must be among"),
    ):
        with pytest.raises(ValueError, match=message):
            write_rows(table, chunk)
    assert not as_dict(table)


def test_rows_of_numbers_are_not_imported_into_a_dynamic_table() -> None:
    module = bags(20, Dynamic())
    name = "embedding_bags.t.weight"
    with pytest.raises(ValueError, match=f"{name} must not be of a dynamic table.*load_rows"):
        import_tables(module, {name: torch.zeros(20, 3)})
