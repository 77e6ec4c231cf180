"""TorchRec's state dicts hold the ids of dynamic tables, and training goes on from them."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.dynamic_torchrec import (
    CAPACITIES,
    DIM,
    Case,
    batch,
    make,
    num_ids_held,
    trained,
)
from torchembed import LFU, CountMinSketch, Dynamic, MinimumCount
from torchembed.checkpoints import export_rows, open_rows

KINDS = {"is_dynamic": True, "is_weighted": False, "is_fixed": False}

CASES = {
    # Full tables, so that ids are evicted, and both kinds of counts.
    "rows": Case(
        ["row_wise", "row_wise", "table_wise"],
        dynamic=Dynamic(eviction=LFU(), admission=MinimumCount(2)),
        other=Dynamic(admission=CountMinSketch(threshold=2, width=64, depth=2)),
        capacities={"a": 16, "b": 20, "c": CAPACITIES["c"]},
    ),
    "columns": Case(
        ["column_wise", "table_wise", "row_wise"],
        dynamic=Dynamic(eviction=LFU()),
        capacities={"a": 24, "b": 20, "c": CAPACITIES["c"]},
    ),
    "sequences": Case(["row_wise", "columns on one rank", "row_wise"], is_sequence=True),
    "DTensors": Case(["row_wise"] * 3, output_dtensor=True, optimizer="adagrad"),
}


def steps(model: Any, first: int, last: int) -> list[Tensor]:
    return trained(model, (batch(step, **KINDS) for step in range(first, last)))


def state_of(model: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def everything_on_the_cpu() -> dict[str, Any]:
    """On a rank: for each case names in the state dict, ids held, whether training goes on."""
    import torch.distributed.checkpoint as dcp

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        saved, loaded = make(case, is_dynamic=True), make(case, is_dynamic=True)
        steps(saved, 0, 4)
        steps(loaded, 9, 11)  # ids and states that must go
        state = state_of(loaded)
        kinds = {key: type(value).__name__ for key, value in state["model"].items()}
        with tempfile.TemporaryDirectory() as folder:
            folders = [folder]
            dist.broadcast_object_list(folders)
            dcp.save(state_of(saved), checkpoint_id=folders[0])
            dcp.load(state, checkpoint_id=folders[0])
            dist.barrier()
        report = loaded.load_state_dict(state["model"])
        loaded.fused_optimizer.load_state_dict(state["optimizer"])
        held = num_ids_held(saved), num_ids_held(loaded)
        equal = [
            torch.equal(a, b) for a, b in zip(steps(saved, 4, 8), steps(loaded, 4, 8), strict=True)
        ]
        found[name] = kinds, held, equal, (report.missing_keys, report.unexpected_keys)
        whole = loaded.state_dict()
        short = {key: value for key, value in whole.items() if ".index.touched" not in key}
        left_out = [key.removeprefix("sparse.") for key in whole if key not in short]
        found[f"{name}, short"] = left_out, error_of_load(loaded, short)
    return {**found, "by rows": by_rows(), "of the other rank": of_the_other_rank()}


def of_the_other_rank() -> str:
    """On a rank: the error of loading the ids that the other one holds of a table that a hash
    divides."""
    model = make(CASES["rows"], is_dynamic=True)
    steps(model, 0, 2)
    state, start = model.state_dict(), "sparse.embedding_bags.a.index."
    own = {k: v.local_shards()[0].tensor for k, v in state.items() if k.startswith(start)}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return error_of_load(model, {**state, **of_ranks[1 - dist.get_rank()]})


def error_of_load(model: torch.nn.Module, state: dict[str, Any]) -> str:
    """The error of loading ``state`` not strictly; empty without one."""
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        return str(error)
    return ""


def by_rows() -> list[bool]:
    """On a rank: whether training goes on as before in a model with other placements, which got the
    rows and their optimizer states by id."""
    from torchembed.integrations.torchrec import dynamic_tables

    before, after = ["row_wise", "table_wise", "row_wise"], ["table_wise", "row_wise", "row_wise"]
    saved, loaded = (make(Case(p), is_dynamic=True) for p in (before, after))
    steps(saved, 0, 3)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        tables = dynamic_tables(loaded)
        for name, table in dynamic_tables(saved).items():
            path = Path(folders[0]) / name
            export_rows(table.row_chunks(1000), path)
            for chunk in open_rows(path, chunk_bytes=1000):
                tables[name].write_rows(chunk)
        dist.barrier()
    # Columns of the static table, whose rows stayed behind, are the last.
    pairs = zip(steps(saved, 3, 6), steps(loaded, 3, 6), strict=True)
    return [torch.equal(a[:, :-DIM], b[:, :-DIM]) for a, b in pairs]


def test_training_goes_on_from_a_checkpoint(cpu_answers: list[Any]) -> None:
    for answers in cpu_answers:
        for name in CASES:
            _, (of_saved, of_loaded), equal, report = answers["dynamic_checkpoints"][name]
            assert of_saved == of_loaded and min(of_saved.values()) > 0
            assert equal and all(equal), name
            assert report == ([], [])
            left_out, error = answers["dynamic_checkpoints"][f"{name}, short"]
            # Sharded modules are loaded one by one, and the first one raises.
            assert "of the table was loaded" in error
            assert any(f"lacks ['{key}']" in error for key in left_out)


def test_ids_of_another_rank_are_refused(cpu_answers: list[Any]) -> None:
    for rank, answers in enumerate(cpu_answers):
        error = answers["dynamic_checkpoints"]["of the other rank"]
        assert "a.index.ids must hold ids where dynamic table a looks for them" in error
        assert f"part {rank + 1} of 2" in error


def test_other_placements_get_rows_by_id(cpu_answers: list[Any]) -> None:
    for answers in cpu_answers:
        assert answers["dynamic_checkpoints"]["by rows"] == [True] * 4


def test_names_and_kinds_of_entries(cpu_answers: list[Any]) -> None:
    first, second = (answers["dynamic_checkpoints"] for answers in cpu_answers)
    kinds = first["rows"][0]
    of_ids = {
        key: kind for key, kind in kinds.items() if key.startswith("sparse.embedding_bags.a.")
    }
    names = ("weight", *(f"index.{n}" for n in ("ids", "digests", "touched", "scores", "counters")))
    assert {f"sparse.embedding_bags.a.{n}" for n in names} <= set(of_ids)
    assert set(of_ids.values()) == {"ShardedTensor"}
    assert first["columns"][0]["sparse.embedding_bags.a.index.ids"] == "Tensor"
    # One rank alone holds a table that is placed whole.
    whole = "sparse.embedding_bags.b.index.ids"
    assert [whole in of_rank["columns"][0] for of_rank in (first, second)] == [False, True]
    assert first["sequences"][0]["sparse.embeddings.a.index.ids"] == "ShardedTensor"
    assert first["DTensors"][0]["sparse.embedding_bags.a.index.ids"] == "DTensor"
    assert not any("index" in key for key in kinds if ".c." in key)
