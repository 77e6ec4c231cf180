"""Versions that cannot be loaded change no row by which others answer, and those that were
deployed anew are loaded with their own."""

import dataclasses
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.served_lookups import options_over
from torchembed.serving.models import ModelRepository, deploy, read_description
from torchembed.serving.models.description import FileForm
from torchembed.stores import MemoryStore, RocksDBStore, StoreFullError

NUM_ROWS = 8


class Stamped(nn.Module):
    """Two tables whose rows all are one number."""

    def __init__(self, stamp: float) -> None:
        super().__init__()
        self.one = torchembed.EmbeddingBag(NUM_ROWS, 3, mode="sum")
        self.other = torchembed.EmbeddingBag(NUM_ROWS, 2, mode="sum")
        with torch.no_grad():
            self.one.weight.fill_(stamp)
            self.other.weight.fill_(stamp)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"one": self.one(ids), "other": self.other(ids)}


def deploy_stamped(folder: Path, version: int, stamp: float) -> Path:
    examples = torch.zeros(2, 1, dtype=torch.int64)
    return deploy(Stamped(stamp), folder, name="m", version=version, examples=examples)


def stamps(repository: ModelRepository) -> tuple[str, set[float]]:
    """The version and all numbers of an answer."""
    ids = np.arange(NUM_ROWS).reshape(-1, 1)
    answer = repository.model("m").answer({"ids": ids}, ["one", "other"])
    return answer.version, {float(x) for a in answer.outputs.values() for x in np.unique(a)}


def lose_last_table(folder: Path) -> None:
    shutil.rmtree(folder / "tables" / "other")


def give_program_of_another_torch(folder: Path) -> None:
    """As one that is whole, and that this torch does not read."""
    description, content = read_description(folder), b"of another torch"
    (folder / "dense.pt2").write_bytes(content)
    form = FileForm(num_bytes=len(content), crc32=zlib.crc32(content))
    changed = dataclasses.replace(description, files={**description.files, "dense.pt2": form})
    (folder / "model.json").write_bytes(changed.to_bytes())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_last_table, "lacks its file tables/other"),
        (give_program_of_another_torch, "must be a program that deploy.. wrote, and of a torch"),
    ],
)
def test_a_load_that_fails_leaves_the_rows(damage: object, message: str, tmp_path: Path) -> None:
    deploy_stamped(tmp_path, 1, stamp=1.0)
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        repository.start()
        folder = deploy_stamped(tmp_path, 2, stamp=2.0)
        assert callable(damage)
        damage(folder)
        with pytest.raises(ValueError, match=f"model m cannot be loaded: .*{message}"):
            repository.load("m")
        assert stamps(repository) == ("1", {1.0})


def test_a_damaged_table_leaves_the_rows_of_others(tmp_path: Path) -> None:
    deploy_stamped(tmp_path, 1, stamp=1.0)
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        repository.start()
        folder = deploy_stamped(tmp_path, 2, stamp=2.0)
        (rows,) = (folder / "tables" / "other").glob("*.safetensors")
        rows.write_bytes(rows.read_bytes()[:-4] + b"\1\2\3\4")
        with pytest.raises(ValueError, match=r"table other of .* is corrupt"):
            repository.load("m")
        assert stamps(repository) == ("1", {1.0})


def replace_stamped(folder: Path, version: int, stamp: float) -> None:
    shutil.rmtree(folder / "m" / str(version))
    deploy_stamped(folder, version, stamp)


def test_a_version_that_was_deployed_anew_is_loaded_again(tmp_path: Path) -> None:
    models = tmp_path / "models"
    deploy_stamped(models, 1, stamp=1.0)
    with MemoryStore() as store, ModelRepository(models, options_over(store)) as repository:
        repository.start()
        repository.unload("m")
        replace_stamped(models, 1, stamp=5.0)
        repository.load("m")
        assert stamps(repository) == ("1", {5.0})


def test_a_version_that_was_deployed_anew_replaces_rows_on_disk(tmp_path: Path) -> None:
    pytest.importorskip("rocksdict")
    models = tmp_path / "models"
    deploy_stamped(models, 1, stamp=1.0)

    def serve(expected: float, updated: float = 0.0) -> None:
        with (
            RocksDBStore(tmp_path / "rows") as store,
            ModelRepository(models, options_over(store), records=store) as repository,
        ):
            repository.start()
            assert stamps(repository) == ("1", {expected})
            for table, dim in (("one", 3), ("other", 2)) if updated else ():
                rows = torch.ones(NUM_ROWS, dim) * updated
                repository.apply_rows("m", table, torch.arange(NUM_ROWS), rows, version=1)

    serve(1.0, updated=2.0)
    serve(2.0)  # what updates have overtaken is not loaded again
    replace_stamped(models, 1, stamp=5.0)
    serve(5.0, updated=6.0)
    serve(6.0)


class _Filling(MemoryStore):
    """Takes no rows of one of the tables while it is full."""

    is_full = False

    def _check_table_writable(self, table: Any) -> None:
        if self.is_full and table.name == "m/other":
            raise StoreFullError("there is no room")
        super()._check_table_writable(table)


@pytest.mark.parametrize("next_version", [1, 2])
def test_rows_that_a_load_left_half_written_are_loaded_again(
    next_version: int, tmp_path: Path
) -> None:
    deploy_stamped(tmp_path, 1, stamp=1.0)
    with _Filling() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        repository.start()
        deploy_stamped(tmp_path, 2, stamp=2.0)
        store.is_full = True
        with pytest.raises(ValueError, match="there is no room"):
            repository.load("m")
        assert stamps(repository) == ("1", {1.0, 2.0})
        store.is_full = False
        repository.unload("m")
        repository.load("m", str(next_version))
        assert stamps(repository) == (str(next_version), {float(next_version)})
