"""Rows, exports and deltas of tables on disk: the same as of tables on the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.disk_runs import new_run, rows_of, trained
from tests.support.tiny_model import KEYS, fixed_batches
from torchembed import Dynamic, HashedRows
from torchembed.checkpoints import (
    DeltaFolder,
    export_rows,
    load_deltas,
    load_rows,
    model_rows,
    open_rows,
)
from torchembed.training import (
    CheckpointFolder,
    export_safetensors,
    import_tables,
    open_safetensors,
    whole_tables,
)

PLACES = ["device", "disk"]
SMALL = Dynamic(deletion_log=200)
NAMES = [f"tables.embedding_bags.{key}.weight" for key in KEYS]


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


def test_deltas_are_those_of_tables_on_the_device(tmp_path: Path) -> None:
    """With ids that leave, and rows that ids share."""
    dynamic = Dynamic(deletion_log=200, missing=HashedRows(3))
    runs = [new_run(place, tmp_path / place, dynamic, capacity=16) for place in PLACES]
    marks: list[Any] = [None, None]
    for first in range(0, 9, 3):
        found = []
        for number, run in enumerate(runs):
            trained(run, fixed_batches(9)[first : first + 3])
            delta = run.model.tables.delta(marks[number])  # type: ignore[operator,union-attr]
            marks[number] = delta.mark
            found.append(delta)
        for name, on_device in found[0].tables.items():
            on_disk = found[1].tables[name]
            assert (len(on_disk.deleted_ids) > 0) == (first > 0)
            order, own = on_device.ids.argsort(), on_disk.ids.argsort()
            assert torch.equal(on_device.ids[order], on_disk.ids[own])
            assert torch.equal(on_device.rows[order], on_disk.rows[own])
            assert torch.equal(on_device.deleted_ids, on_disk.deleted_ids)
            assert torch.equal(on_device.shared_rows, on_disk.shared_rows)
            assert not on_disk.rows.is_meta and len(on_disk.shared_rows) == 3


@pytest.mark.parametrize("dynamic", [None, SMALL], ids=["static", "dynamic"])
@pytest.mark.parametrize(("exported", "loaded"), [("disk", "device"), ("device", "disk")])
def test_exports_day_after_day_are_followed_across_tiers(
    exported: str, loaded: str, dynamic: Dynamic | None, tmp_path: Path
) -> None:
    run = new_run(exported, tmp_path / "a", dynamic)
    follower = trained(new_run(loaded, tmp_path / "b", dynamic), fixed_batches(8)[6:])
    folder, at = DeltaFolder(tmp_path / "deltas"), None
    for day in range(3):
        trained(run, fixed_batches(6)[2 * day : 2 * day + 2])
        assert folder.export(run.model, day) == (day == 0 or dynamic is None)
        at, _ = load_deltas(follower.model, tmp_path / "deltas", after=at)
        found, wanted = rows_of(follower), rows_of(run)
        for name in (name for name in wanted if name.endswith((".rows", ".keys"))):
            assert torch.equal(found[name], wanted[name]), name


@pytest.mark.parametrize("dynamic", [None, SMALL], ids=["static", "dynamic"])
@pytest.mark.parametrize(("given", "taking"), [("disk", "device"), ("host", "disk")])
def test_rows_by_key_cross_tiers(
    given: str, taking: str, dynamic: Dynamic | None, tmp_path: Path
) -> None:
    """With their states."""
    run = trained(new_run(given, tmp_path / "a", dynamic), fixed_batches(5))
    other = trained(new_run(taking, tmp_path / "b", dynamic), fixed_batches(9)[7:])
    for number, name in enumerate(NAMES):
        export_rows(model_rows(run.model, name, chunk_bytes=100), tmp_path / f"rows-{number}")
        assert load_rows(other.model, name, open_rows(tmp_path / f"rows-{number}")) == 0
    found, wanted = rows_of(other), rows_of(run)
    for name in NAMES:
        is_given = torch.isin(found[f"{name}.keys"], wanted[f"{name}.keys"])
        for part in ("keys", "rows", "sum"):
            assert torch.equal(found[f"{name}.{part}"][is_given], wanted[f"{name}.{part}"]), name


def test_static_tables_are_exported_and_imported(tmp_path: Path) -> None:
    runs = {place: new_run(place, tmp_path / place, None) for place in PLACES}
    for run in runs.values():
        trained(run, fixed_batches(5))
    export_safetensors(runs["disk"].model, tmp_path / "exported")
    exported = open_safetensors(tmp_path / "exported")
    for name, tensor in runs["device"].model.state_dict().items():
        assert torch.equal(exported[name], tensor), name
    whole = {place: dict(whole_tables(run.model)) for place, run in runs.items()}
    assert list(whole["disk"]) == NAMES
    assert all(torch.equal(t, whole["device"][n]) for n, t in whole["disk"].items())  # type: ignore[arg-type]
    other = trained(new_run("disk", tmp_path / "other", None), fixed_batches(9)[7:])
    import_tables(other.model, {name: exported[name] for name in NAMES})
    found, wanted = rows_of(other), rows_of(runs["disk"])
    assert all(torch.equal(found[f"{n}.rows"], wanted[f"{n}.rows"]) for n in NAMES)


@pytest.mark.parametrize("saved", PLACES)
@pytest.mark.parametrize("loaded", PLACES)
@pytest.mark.parametrize("capacity", [30, 40])
def test_checkpoints_of_rows_that_ids_share(
    saved: str, loaded: str, capacity: int, tmp_path: Path
) -> None:
    """In tables of one capacity, and of another."""
    dynamic = Dynamic(missing=HashedRows(3), deletion_log=50)
    run = trained(new_run(saved, tmp_path / "a", dynamic, capacity=30), fixed_batches(4))
    CheckpointFolder(tmp_path / "run").save(4, run)
    other = new_run(loaded, tmp_path / "b", dynamic, capacity=capacity)
    trained(other, fixed_batches(9)[7:])
    assert CheckpointFolder(tmp_path / "run").load(other) == 4
    assert_same(rows_of(other), rows_of(run))
    deltas = [r.model.tables.delta().tables for r in (run, other)]  # type: ignore[operator,union-attr]
    for name, of_table in deltas[0].items():
        assert torch.equal(of_table.shared_rows, deltas[1][name].shared_rows)
