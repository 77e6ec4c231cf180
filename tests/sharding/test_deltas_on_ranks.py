"""Deltas of dynamic tables that gloo ranks share: those of all ranks are those of whole tables."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import torchembed
from tests.support.dynamic_tables import one_bag_each, train_on, two_and_a_static_one
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import made_mesh
from torchembed import Dynamic, SnapshotDueError, TableDelta, gather_delta

PLACEMENTS = {"a": "row_wise", "b": "table_wise", "c": "data_parallel"}
Rows = dict[str, dict[int, list[float]]]


def sharded(placements: dict[str, str], dynamic: Dynamic) -> nn.Module:
    model = nn.Module()
    model.tables = two_and_a_static_one(8, dynamic)
    named = {f"tables.embedding_bags.{name}": value for name, value in placements.items()}
    return torchembed.shard_embeddings(model, made_mesh("cpu", 1), named)


def applied(copies: Rows, changes: Mapping[str, TableDelta]) -> Rows:
    """``copies`` after the changes of whole tables."""
    after = {name: dict(copies.get(name, {})) for name in changes}
    for name, of_table in changes.items():
        for _, id_, row in of_table.operations():
            if row is None:
                after[name].pop(id_, None)
            else:
                after[name][id_] = row.tolist()
    return after


def followed_on_rank() -> dict[str, Any]:
    """On a rank: copies that followed training by deltas, and full snapshots beside them, on the
    first rank; and the errors where one rank's log is too short, and of divided columns."""
    model, rank = sharded(PLACEMENTS, Dynamic(deletion_log=50)), dist.get_rank()
    tables: Any = model.tables
    optimizer = torchembed.optim.Adagrad(list(model.parameters()), lr=0.5)
    mark, copies, pairs, num_deleted = None, Rows(), [], 0
    for step in range(6):
        ids = [5 * step + rank, 5 * step + 2, 5 * step + 3, 1000 - step]
        train_on(tables, optimizer, ids, ids[:2])
        optimizer.zero_grad()
        if step % 2:
            own = tables.delta(mark)
            mark, changes, whole = own.mark, gather_delta(own), gather_delta(tables.delta())
            assert (changes is None) == (whole is None) == (rank > 0)
            if changes is not None and whole is not None:
                copies = applied(copies, changes)
                num_deleted += sum(len(of.deleted_ids) for of in changes.values())
                pairs.append((copies, applied({}, whole)))
    short = sharded(PLACEMENTS, Dynamic(deletion_log=2))
    others: Any = short.tables
    optimizer = torchembed.optim.SGD(list(short.parameters()), lr=0.5)
    train_on(others, optimizer, [1], [1])
    mark = others.delta().mark
    for step in range(1, 9):
        # Only the rank that holds table b evicts.
        train_on(others, optimizer, [1], list(range(4 * step, 4 * step + 4)))
    with pytest.raises(SnapshotDueError) as due:
        others.delta(mark)
    by_columns: Any = sharded({**PLACEMENTS, "a": "column_wise"}, Dynamic(deletion_log=2)).tables
    by_columns(one_bag_each([1], [2]))
    with pytest.raises(ValueError, match="table a must have all of its 2 columns on one rank"):
        by_columns.delta()
    return {"pairs": pairs, "num_deleted": num_deleted, "due": str(due.value)}


def test_snapshots_and_deltas_of_all_ranks_are_later_snapshots() -> None:
    first, second = run_on_ranks(2, followed_on_rank)
    assert second["pairs"] == []
    assert [copies == whole for copies, whole in first["pairs"]] == [True] * 3
    assert first["pairs"][-1][1]["a"].keys() != first["pairs"][0][1]["a"].keys()
    assert first["num_deleted"] > 0
    # The rank whose log is too short raises, and the other names it.
    named = [result["due"] for result in (first, second) if "rank" in result["due"]]
    assert len(named) == 1
    assert "raised SnapshotDueError: " in named[0]
