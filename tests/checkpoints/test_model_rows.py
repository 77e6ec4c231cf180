"""Rows by key out of sharded models and into them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.row_chunks import Row, rows_by_key
from tests.support.sharded_cases import (
    Case,
    exact_loss,
    make_batch,
    make_model,
    make_optimizer,
    vectors_of,
)
from torchembed.checkpoints import export_rows, load_rows, model_rows, open_rows
from torchembed.tables import RowChunk, row_chunks

PLACEMENTS = {"a": "row_wise", "b": "column_wise", "c": "data_parallel", "d": "table_wise"}
CASE = Case(placements=PLACEMENTS, dynamic=("a", "b"), optimizer="Adam")
OTHERS = {"a": "column_wise", "b": "row_wise", "c": "row_wise", "d": "column_wise"}
OTHER_CASE = Case(placements=OTHERS, dynamic=("a", "d"), optimizer="Adam")
EXPORTED = "acd"


def name_of(table: str) -> str:
    return f"tables.embedding_bags.{table}.weight"


def sharded(case: Case) -> tuple[nn.Module, Any]:
    model = make_model(case, "meta")
    torchembed.shard_embeddings(model, case.mesh(), case.plan(dist.get_world_size()))
    return model, make_optimizer(case, model)


def export_and_load(folder: str) -> dict[str, Any]:
    """On a rank: errors, and what it holds of tables of other placements that rows were loaded
    into, by columns."""
    model, optimizer = sharded(CASE)
    for step in range(3):
        batch = make_batch(CASE, dist.get_rank(), step)
        exact_loss(vectors_of(model.tables(batch))).backward()
        optimizer.step()
    for table in EXPORTED:
        export_rows(model_rows(model, name_of(table), chunk_bytes=300), f"{folder}/{table}")
    errors = []
    with pytest.raises(ValueError, match=r"b\.weight must not have its columns divided") as raised:
        model_rows(model, name_of("b"))
    errors.append(str(raised.value))
    other, _ = sharded(OTHER_CASE)
    held = {}
    for table in EXPORTED:
        assert load_rows(other, name_of(table), open_rows(f"{folder}/{table}")) == 0
        (of_rank,) = [t for t in other.tables.table_set.tables if t.spec.name == table] or [None]
        if of_rank is not None:
            held[table] = of_rank.first_column, rows_by_key(row_chunks(of_rank, 300))
    before = [parameter.clone() for parameter in other.parameters()]
    one = torch.tensor([2**40])
    for name, source, message in (
        ("nothing", [], "name must be that of a table's weight"),
        (name_of("a"), iter([]), "source must be a RowSource or a list"),
        (name_of("c"), [RowChunk(one, torch.ones(1, 5), {})], r"keys of source must be in \[0, 50"),
        (name_of("a"), [RowChunk(one, torch.ones(1, 5), {})], r"rows of source must have shape"),
        (name_of("a"), [RowChunk(one, torch.ones(1, 8), {"sum": one})], "states of source must be"),
    ):
        with pytest.raises((ValueError, TypeError), match=message) as raised:
            load_rows(other, name, source)
        errors.append(str(raised.value))
    assert all(map(torch.equal, before, other.parameters()))
    return {"held": held, "errors": errors}


def test_rows_go_from_one_placement_to_any_other(tmp_path: Path) -> None:
    """Each rank writes rows of its own, and takes those of its own, of its columns; static and
    dynamic tables, and static ones that become dynamic."""
    results = run_on_ranks(2, export_and_load, str(tmp_path))
    assert results[0]["errors"] == results[1]["errors"]
    for table in EXPORTED:
        expected = rows_by_key(open_rows(tmp_path / table))
        assert len(expected) > 2
        found: dict[int, list[tuple[int, Row]]] = {}
        for result in results:
            first_column, rows = result["held"].get(table, (0, {}))
            for key, row in rows.items():
                found.setdefault(key, []).append((first_column, row))
        assert set(found) == set(expected)
        for key, row in expected.items():
            parts = [part for _, part in sorted(found[key], key=lambda held: held[0])]
            assert [value for part in parts for value in part.values] == row.values
            for state, values in row.states.items():
                assert [value for part in parts for value in part.states[state]] == values
            if row.score is not None:
                assert all((p.score, p.touched) == (row.score, row.touched) for p in parts)


@pytest.mark.parametrize("storage", [None, torchembed.HostMemory(cache_rows=5)])
def test_a_dynamic_table_without_ids_is_exported(storage: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dynamic": torchembed.Dynamic(), "storage": storage}
    model = nn.ModuleDict({"bag": torchembed.EmbeddingBag(20, 4, **settings)})
    torchembed.optim.Adam(model.parameters())
    export_rows(model_rows(model, "bag.weight"), tmp_path / "rows")
    source = open_rows(tmp_path / "rows")
    assert (source.num_rows, source.embedding_dim) == (0, 4)
    (chunk,) = model_rows(model, "bag.weight")
    assert chunk.states["exp_avg"].shape == chunk.rows.shape == (0, 4)
    assert load_rows(model, "bag.weight", source) == 0


def test_keys_of_other_dtypes_are_named() -> None:
    model = nn.ModuleDict({"bag": torchembed.EmbeddingBag(20, 4, dynamic=torchembed.Dynamic())})
    keys, rows = torch.tensor([1, 2]), torch.ones(2, 4)
    for chunk, message in (
        (RowChunk(keys.int(), rows, {}), r"keys of source must be int64 to load bag\.weight, got"),
        (
            RowChunk(keys, rows, {}, scores=keys.float()),
            r"scores of source must be int64 .*float32",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            load_rows(model, "bag.weight", [chunk])
