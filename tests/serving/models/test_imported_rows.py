"""Tables that are deployed of other rows than the model's own."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import torchembed
from tests.support.served_lookups import options_over
from torchembed.checkpoints import (
    RowSource,
    export_rows,
    open_hugectr_rows,
    open_rows,
    open_safetensors_rows,
)
from torchembed.serving.models import DeployError, ModelRepository, deploy
from torchembed.stores import MemoryStore
from torchembed.tables import RowChunk

DIM = 3
KEYS = np.array([0, 5, -1, 2**62], dtype="<i8")
ROWS = np.arange(len(KEYS) * DIM, dtype="<f4").reshape(len(KEYS), DIM)
EXAMPLES = torch.zeros(2, 1, dtype=torch.int64)


def model() -> nn.Sequential:
    dynamic = torchembed.Dynamic(missing="zeros")
    return nn.Sequential(torchembed.EmbeddingBag(64, DIM, mode="sum", dynamic=dynamic))


def of_hugectr(folder: Path) -> RowSource:
    folder.mkdir()
    KEYS.tofile(folder / "key")
    ROWS.tofile(folder / "emb_vector")
    return open_hugectr_rows(folder, embedding_dim=DIM)


def of_an_export(folder: Path) -> RowSource:
    export_rows(iter([RowChunk(torch.from_numpy(KEYS), torch.from_numpy(ROWS), {})]), folder)
    return open_rows(folder)


def of_safetensors(folder: Path) -> RowSource:
    folder.mkdir()
    file = folder / "model.safetensors"
    tensors = {"item.weight": torch.from_numpy(ROWS), "item.ids": torch.from_numpy(KEYS)}
    save_file(tensors, file)
    return open_safetensors_rows(file, "item.weight", keys="item.ids")


@pytest.mark.parametrize("source", [of_hugectr, of_an_export, of_safetensors])
def test_they_are_served_in_place_of_the_models(
    source: Callable[[Path], RowSource], tmp_path: Path
) -> None:
    models, rows = tmp_path / "models", source(tmp_path / "rows")
    deploy(model(), models, name="m", version=1, examples=EXAMPLES, tables={"0": rows})
    with MemoryStore() as store, ModelRepository(models, options_over(store)) as repository:
        repository.start()
        asked = np.append(KEYS, 7).reshape(-1, 1)
        (name,) = (i.name for i in repository.model("m").form.inputs)
        answer = repository.model("m").answer({name: asked})
    np.testing.assert_array_equal(answer.outputs["output"][:-1], ROWS)
    np.testing.assert_array_equal(answer.outputs["output"][-1], np.zeros(DIM))
    assert answer.outputs["default_rows"].tolist() == [0, 0, 0, 0, 1]


def test_rows_of_another_width_and_unknown_tables_are_named(tmp_path: Path) -> None:
    rows = of_hugectr(tmp_path / "rows")
    wide = nn.Sequential(torchembed.EmbeddingBag(64, 4, mode="sum"))
    for given, table, message in (
        (wide, "0", "rows of table 0 must have 4 columns, got 3"),
        (model(), "x", r"tables must name tables of the model, \['0'\], got \['x'\]"),
    ):
        with pytest.raises(DeployError, match=message):
            deploy(given, tmp_path, name="m", version=1, examples=EXAMPLES, tables={table: rows})
